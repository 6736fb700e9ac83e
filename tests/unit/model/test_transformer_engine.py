"""Transformer Engine's layers in the blocks, with a stand-in that emulates FP8 on a CPU.

It shows that the wiring is right: names, groups, contexts and signatures. It cannot show that
Transformer Engine's kernels work, which `benchmarks/gpu_check` does where they are installed.
"""

import inspect
import json
import sys
import types
from dataclasses import fields

import pytest
import torch
from engine_jobs import FOLDER, stand_in
from small_batches import batch_of, photographs
from tiny import BLOCK_OBJECTIVES, VIT, tiny

from megavis.config.errors import UserError
from megavis.model import kernels
from megavis.model.core import Block
from megavis.model.norms import GainNorm, Norm
from megavis.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear

ENGINE = ["training.kernels=transformer_engine", "training.tf32=true"]
FP8 = [*ENGINE, "training.fp8=true", "training.precision=bf16", "parallel.zero_stage=1"]
FULL = "parallel.activation_checkpointing=full"
U = 2.0**-4
"""Largest relative error of rounding to E4M3, which has three bits after the leading one."""


@pytest.fixture
def engine():
    with stand_in():
        kernels.choose_kernels("transformer_engine")
        yield


class Model:
    """A model with random weights in training, and a batch of it."""

    def __init__(self, build_paper, name, *words, num_images=16, model=None):
        sizes = {"num_layers": 2, "hidden_size": 32} | ({} if name == "igpt" else VIT)
        text = tiny(BLOCK_OBJECTIVES[name], model=sizes | (model or {}), data={"image_size": 12})
        self.objective, self.inference = build_paper(text, *words, std=0.1)
        self.layers = [layer.train() for layer in self.inference.layers.modules]
        ids = torch.randint(12, (num_images, 144), generator=torch.Generator().manual_seed(3))
        self.batch = batch_of(ids if name == "igpt" else photographs(num_images, 12))

    def loss(self):
        sequence = self.objective.training_sequence(self.batch)
        state = sequence.inputs
        for layer in self.layers:
            state = layer(state)
        return self.objective.loss(state, sequence.targets)

    def step(self):
        """Return the loss and the gradients by parameter."""
        loss = self.loss()
        loss.backward()
        gradients = {name: p.grad for name, p in self.inference.layers.named_parameters()}
        return loss.detach(), gradients

    def modules(self):
        return [module for layer in self.layers for module in layer.modules()]

    def blocks(self):
        return [module for module in self.modules() if isinstance(module, Block)]


def is_of_engine(module):
    return type(module).__module__.startswith(("transformer_engine", "megavis.model.transformer"))


# ------------------------------------------------------------------------------ the interface


def test_stand_in_has_the_signatures_of_transformer_engine(engine):
    import transformer_engine
    from transformer_engine import pytorch
    from transformer_engine.common.recipe import Float8CurrentScaling

    recorded = json.loads((FOLDER / "signatures.json").read_text())
    assert recorded["version"] == transformer_engine.__version__
    found = {
        "Linear.__init__": _parameters(pytorch.Linear.__init__),
        "Linear.forward": _parameters(pytorch.Linear.forward),
        "LayerNorm.__init__": _parameters(pytorch.LayerNorm.__init__),
        "RMSNorm.__init__": _parameters(pytorch.RMSNorm.__init__),
        "autocast": _parameters(pytorch.autocast.__init__),
        "fp8_autocast": _parameters(pytorch.fp8_autocast),
        "Float8CurrentScaling": [field.name for field in fields(Float8CurrentScaling)],
    }
    assert found == recorded["signatures"]


def _parameters(function):
    texts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != "self":
            plain = parameter.replace(annotation=inspect.Parameter.empty)
            texts.append(str(plain))
    return texts


def test_missing_or_old_library_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(UserError, match="which is not installed; use auto, or install"):
        kernels.choose_kernels("transformer_engine")
    old = types.ModuleType("transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", old)
    with pytest.raises(UserError, match=r"needs Transformer Engine 2\.9 or newer"):
        kernels.choose_kernels("transformer_engine")
    assert kernels.chosen_kernels() == "auto"


# ------------------------------------------------------------------------------ without FP8


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", BLOCK_OBJECTIVES)
def test_names_values_loss_and_gradients_are_those_of_plain_layers(build_paper, name, recomputes):
    plain = Model(build_paper, name)
    wanted_loss, wanted = plain.step()
    values = {key: p.detach().clone() for key, p in plain.inference.layers.named_parameters()}
    with stand_in():
        kernels.choose_kernels("transformer_engine")
        model = Model(build_paper, name, *ENGINE, *[FULL] * recomputes)
        _assert_layers_of_blocks(model)
        found_values = dict(model.inference.layers.named_parameters())
        assert {key: p.shape for key, p in found_values.items()} == {
            key: value.shape for key, value in values.items()
        }
        assert all(torch.equal(found_values[key], values[key]) for key in values)
        loss, found = model.step()
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0.0)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5 * scale)


def _assert_layers_of_blocks(model):
    """Check that all linear layers and norms in blocks are the library's, and none elsewhere."""
    inside = {module for block in model.blocks() for module in block.modules()}
    plain = ColumnParallelLinear, RowParallelLinear, Norm
    assert inside
    assert not any(isinstance(module, plain) for module in inside)
    engines = [module for module in model.modules() if is_of_engine(module)]
    # The projections of attention, two matrices of the MLP; two norms.
    assert len(engines) >= 6 * len(model.blocks())
    assert set(engines) <= inside


def test_first_weights_are_those_of_plain_layers(build_paper):
    """Not only the names: a run starts from the same draws."""
    text = tiny(BLOCK_OBJECTIVES["mp3"], model={**VIT, "hidden_size": 32}, data={"image_size": 12})

    def weights(*words):
        objective, _ = build_paper(text, *words)
        plans = objective.layer_plans()
        return {
            f"{plan.name}.{key}": value
            for plan in plans
            for key, value in plan.build().named_parameters()
        }

    wanted = weights()
    with stand_in():
        kernels.choose_kernels("transformer_engine")
        found = weights(*ENGINE)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_layer_norms_without_bias_stay_ours(build_paper, engine):
    words = [*ENGINE, "model.normalization=layer_norm", "model.norm_bias=last"]
    block = Model(build_paper, "igpt", *words).blocks()[0]
    assert isinstance(block.input_layernorm, GainNorm)
    assert is_of_engine(block.mlp.linear_fc1)


# ------------------------------------------------------------------------------ FP8


def fp8_where_called(model, run):
    """Return the modules that a function calls, and whether FP8 was on."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    seen = []

    def note(module, _):
        seen.append((module, FP8GlobalStateManager.is_fp8_enabled()))

    hooks = [module.register_forward_pre_hook(note) for module in model.modules()]
    run()
    for hook in hooks:
        hook.remove()
    assert not FP8GlobalStateManager.is_fp8_enabled()
    return seen


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", ["igpt", "darl", "memory"])
def test_fp8_is_on_exactly_in_blocks_in_training(build_paper, engine, name, recomputes):
    model = Model(build_paper, name, *FP8, *[FULL] * recomputes)
    inside = {m for block in model.blocks() for m in block.modules() if m is not block}
    seen = fp8_where_called(model, lambda: model.step())
    assert {module for module, _ in seen} >= {m for m in inside if is_of_engine(m)}
    assert {module for module, _ in seen} - inside, "no layer outside was called"
    assert all(is_on == (module in inside) for module, is_on in seen)
    if recomputes:
        calls = [module for module, _ in seen if module in inside and is_of_engine(module)]
        assert len(calls) == 2 * len(set(calls)), "each is called again in the backward pass"
    for layer in model.layers:
        layer.eval()
    with torch.no_grad():
        seen = fp8_where_called(model, lambda: model.loss())
    assert seen
    assert not any(is_on for _, is_on in seen)


def loss_bound(model):
    """Return a bound on the change of the loss by rounding inputs and weights to E4M3.

    With x(1 + e) and w(1 + f), |e| and |f| ≤ U, a product y of n terms changes by at most
    (2U + U²) Σ|w||x|; numbers below the smallest normal one, 2⁻⁶ of 448, err by half a step,
    2⁻¹⁰ of 448, of their tensor's maximum. To first order, the loss changes by |∂loss/∂y| times
    that, summed over all products.
    """
    products = []

    def keep(module, entering, output):
        if len(entering) == 1:  # not parts of a weight, which are products in bf16
            output[0].retain_grad()
            products.append((entering[0].detach(), module.weight.detach(), output[0]))

    linears = [m for m in model.modules() if is_of_engine(m) and m.weight.ndim == 2]
    hooks = [linear.register_forward_hook(keep) for linear in linears]
    model.step()
    for hook in hooks:
        hook.remove()
    bound = 0.0
    for x, weight, y in products:
        x, weight = x.abs(), weight.abs()
        x_error = U * x + 2.0**-10 / 448 * x.amax()
        weight_error = U * weight + 2.0**-10 / 448 * weight.amax()
        error = x_error @ weight.T + x @ weight_error.T + x_error @ weight_error.T
        bound += float((y.grad.abs() * error).sum())
    assert len(products) >= 4 * len(model.blocks())
    return bound


@pytest.mark.parametrize("name", BLOCK_OBJECTIVES)
def test_fp8_changes_the_loss_within_the_bound_of_e4m3(build_paper, engine, name):
    bound = loss_bound(Model(build_paper, name, *ENGINE))
    wanted, _ = Model(build_paper, name, *ENGINE).step()
    loss, gradients = Model(build_paper, name, *FP8).step()
    assert 0.0 < abs(float(loss - wanted)) <= bound
    for key, gradient in gradients.items():
        assert gradient is not None, key
        assert bool(gradient.isfinite().all()), key


@pytest.mark.parametrize("name", ["igpt", "memory"])
def test_a_recomputed_block_rounds_as_before(build_paper, engine, name):
    loss, gradients = Model(build_paper, name, *FP8).step()
    again, recomputed = Model(build_paper, name, *FP8, FULL).step()
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[key], recomputed[key]) for key in gradients)


def test_fp8_follows_the_weights(build_paper, engine):
    """Megatron's wrapper would keep the FP8 weights of the first call."""
    model = Model(build_paper, "mp3", *FP8)
    first = model.loss()
    with torch.no_grad():
        for block in model.blocks():
            block.mlp.linear_fc1.weight.neg_()
    assert not torch.equal(model.loss(), first)


def test_bf16_layers_stay_in_bf16(build_paper, engine):
    model = Model(build_paper, "gvp", *FP8)
    for layer in model.layers:
        layer.to(torch.bfloat16)
    loss, gradients = model.step()
    assert loss.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}


def test_rows_that_do_not_suit_fp8_are_refused(build_paper, engine):
    model = Model(build_paper, "igpt", *FP8, num_images=3)
    model.loss()  # 144 tokens × 3 images
    model = Model(build_paper, "gvp", *FP8, num_images=3)
    with pytest.raises(UserError) as caught:
        model.loss()
    assert str(caught.value) == (
        "training.fp8: needs a multiple of 16 rows in every matrix product of a block, and one has"
        " 19 × 3 (tokens × images); make training.micro_batch_size a multiple of 16, or set fp8 to"
        " false"
    )


def test_sizes_of_other_stacks_are_checked_when_they_are_built(build_paper, engine):
    from megavis.model.transformer_engine import fp8

    model = Model(build_paper, "gvp", *FP8)
    with pytest.raises(UserError) as caught:
        fp8(model.blocks()[0].core.model.model_copy(update={"hidden_size": 48}), 2)
    assert str(caught.value) == (
        "hidden_size of a stack of blocks: 48 must be divisible by 16 ×"
        " tensor_model_parallel_size 2 for training.fp8"
    )
