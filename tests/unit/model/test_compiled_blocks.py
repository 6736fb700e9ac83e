"""Blocks compiled whole: one graph each, with the numbers of the plain form."""

from types import SimpleNamespace

import pytest
import torch
from full_objects import with_full_objects
from packaging.version import Version
from small_batches import batch_of, photographs, run_layers
from small_configs import SMALL, config_writer
from tiny import VIT, tiny
from torch._dynamo.backends.common import aot_autograd

from megavis.config.load import load_config
from megavis.model import compiled_blocks, kernels
from megavis.model.compiled_blocks import take_compilation
from megavis.model.stack import LayerStack
from megavis.training.trainer import Trainer

pytestmark = pytest.mark.once
# Of small models in float32, whose sums a compiler adds in another order.
TOLERANCE = 2e-5
WITH_BLOCKS = [name for name in SMALL if name != "vae_label_maps"]
DROPOUT = ["model.hidden_dropout=0.2", "model.mlp_dropout=0.3", "model.attention_dropout=0.1"]
# Papers without and with coordinates, which windows divide too.
DETECTORS = {
    "mae": ("{name: mae, patch_size: 4}", "learned"),
    "darl": ("{name: darl, patch_size: 4}", "rope_2d"),
}


@pytest.fixture(scope="module")
def write(shards, image_shards, tmp_path_factory):
    return config_writer(shards, image_shards, tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def _from_scratch():
    """No graphs of other tests, whose blocks are of the same code."""
    torch._dynamo.reset()
    take_compilation()
    yield
    kernels.choose_kernels("auto")
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Trace blocks, and run the operators of the graphs one by one; returns the graphs."""
    graphs = []

    def run(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled_blocks, "BACKEND", {"backend": run})
    return graphs


@pytest.fixture
def step_of(context, write):
    """Return loss and gradients of a small model's first micro-batch, with some kernels."""

    def step_of(name, library, *words):
        kernels.choose_kernels(library)
        run = Trainer.open(load_config(write(name), words).config, context)
        engine = SimpleNamespace(micro_batch_size=3, accumulation_steps=1)
        with run.loader(engine) as batches:
            sequence = run.objective.training_sequence(next(iter(batches)))
        model = LayerStack(run.objective.layer_plans(), run.objective.loss).train()
        torch.manual_seed(0)
        with torch.no_grad():
            # Larger than at the start of training, and zero nowhere.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        torch.manual_seed(1)
        loss = model(sequence.inputs, sequence.targets)
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters()}
        return loss.detach(), gradients

    return step_of


def windowed(name):
    """Return a detector on 8² patches, whose blocks but the third and the last attend to 4²."""
    objective, positions = DETECTORS[name]
    finetune = {
        "task": "instances", "num_classes": 3, "head_width": 8, "visibility": "full", "window": 4,
        "global_blocks": [3, 6], "relative_positions": True,
    }  # fmt: skip
    return tiny(
        objective,
        model={**VIT, "num_layers": 6, "positions": positions},
        data={"image_size": 32, "crop": "jittered"},
        training={"validate_every": 1},
        validates=True,
        finetune=finetune,
    )


@pytest.fixture
def detector_step(build_paper):
    """Return loss and gradients of a small detector, with some kernels."""

    def detector_step(name, library, *words):
        kernels.choose_kernels(library)
        objective, inference = build_paper(windowed(name), *words, std=0.1)
        batch = with_full_objects(batch_of(photographs(2, 32)))
        sequence = objective.training_sequence(batch)
        layers = [each.train() for each in inference.layers.modules]
        loss = objective.loss(run_layers(layers, sequence.inputs), sequence.targets)
        loss.backward()
        gradients = {name: each.grad for name, each in inference.layers.named_parameters()}
        return loss.detach(), gradients

    return detector_step


def assert_equal(found, expected, tolerance=TOLERANCE):
    (loss, gradients), (other, others) = found, expected
    torch.testing.assert_close(loss, other, rtol=tolerance, atol=0.0)
    scale = max(float(each.abs().max()) for each in others.values() if each is not None)
    for name, gradient in others.items():
        if gradient is None:
            assert gradients[name] is None
            continue
        atol = tolerance * scale
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=atol, msg=name)


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_every_block_is_one_graph_with_the_plain_numbers(traced, step_of, name):
    expected = step_of(name, "torch")
    assert take_compilation().graphs == 0
    found = step_of(name, "blocks")
    taken = take_compilation()
    assert taken.failure is None
    assert taken.graphs >= 1
    assert_equal(found, expected)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
@pytest.mark.parametrize("name", ["givt", "gvp"])
def test_recomputed_blocks_with_dropout_draw_the_same(traced, step_of, name, checkpointing):
    """Dropout and drop path are those of the plain form: other draws would be other losses."""
    words = [*DROPOUT, f"parallel.activation_checkpointing={checkpointing}"]
    expected = step_of(name, "torch", *DROPOUT)
    assert_equal(step_of(name, "blocks", *words), expected)
    assert take_compilation().failure is None
    other = step_of(name, "blocks")
    assert not torch.isclose(other[0], expected[0], rtol=TOLERANCE, atol=0.0)


def test_blocks_of_a_stack_share_graphs(traced, step_of):
    step_of("igpt", "blocks", "model.num_layers=5")
    assert len(traced) == 1
    step_of("igpt", "blocks", "model.num_layers=5", "parallel.activation_checkpointing=full")
    assert len(traced) == 3, "one without gradients, one with them"
    step_of("gvp", "blocks", "model.num_layers=5", "model.drop_path=0.3")
    assert len(traced) == 5, "the last block computes fewer tokens"
    assert take_compilation().graphs == len(traced)


def test_evaluation_and_other_kernels_compile_nothing(traced, context, write):
    for library, training in (("blocks", False), ("auto", True), ("regions", True)):
        kernels.choose_kernels(library)
        run = Trainer.open(load_config(write("igpt")).config, context)
        model = LayerStack(run.objective.layer_plans(), run.objective.loss).train(training)
        ids = torch.zeros(2, 64, dtype=torch.int64)
        state = run.objective.core.config.model.hidden_size
        model.layers[1](torch.randn(ids.shape[1], 2, state))
        assert take_compilation().graphs == 0


def test_failure_goes_on_without(step_of, monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no compiler\nfor this")

    monkeypatch.setattr(compiled_blocks, "BACKEND", {"backend": fails})
    expected = step_of("igpt", "torch")
    assert_equal(step_of("igpt", "blocks"), expected)
    taken = take_compilation()
    assert taken.graphs == 0
    assert "no compiler" in taken.failure
    assert kernels.chosen_kernels() == "regions"


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.14"),
    reason="torch 2.11 compiles a backward pass when it first runs",
)
def test_failure_of_the_backward_pass_goes_on_without(step_of, monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no registers for this")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=fails)
    monkeypatch.setattr(compiled_blocks, "BACKEND", {"backend": backend})
    expected = step_of("igpt", "torch")
    assert_equal(step_of("igpt", "blocks"), expected)
    assert "no registers" in take_compilation().failure
    assert kernels.chosen_kernels() == "regions"


def test_lack_of_memory_is_no_failure_to_compile(step_of, monkeypatch):
    def run(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(compiled_blocks, "BACKEND", {"backend": lambda graph, inputs: run})
    with pytest.raises(torch.OutOfMemoryError):
        step_of("igpt", "blocks")
    assert take_compilation().failure is None


def test_inductor_computes_the_plain_numbers(step_of):
    """Compiled to C++, with dropout: masks are bit for bit those of the plain form."""
    expected = step_of("igpt", "torch", *DROPOUT)
    assert_equal(step_of("igpt", "blocks", *DROPOUT), expected)
    taken = take_compilation()
    assert taken.failure is None
    assert taken.graphs >= 1


@pytest.mark.parametrize(("name", "stays_plain"), [("igpt", False), ("darl", True)])
def test_blocks_that_zero3_gathers_in_parts_stay_plain(name, stays_plain, traced, context, write):
    words = ["parallel.zero_stage=3"]
    kernels.choose_kernels("blocks")
    run = Trainer.open(load_config(write(name), words).config, context)
    plans = run.objective.layer_plans()
    block = next(
        layer for layer in LayerStack(plans, run.objective.loss).layers if hasattr(layer, "run")
    )
    assert block.is_gathered_in_parts == stays_plain


@pytest.mark.parametrize("name", DETECTORS)
def test_blocks_within_windows_share_a_graph(traced, detector_step, name):
    """One graph for windows of all images, another for whole images, with the plain numbers."""
    drops = "finetune.drop_path=0.3"
    expected = detector_step(name, "torch", drops)
    assert_equal(detector_step(name, "blocks", drops), expected)
    assert len(traced) == 2
    recomputes = "parallel.activation_checkpointing=full"
    assert_equal(detector_step(name, "blocks", drops, recomputes), expected)
    assert len(traced) == 6, "two without gradients, two with them"
    taken = take_compilation()
    assert (taken.graphs, taken.failure) == (6, None)
