"""Stochastic depth: residual branches are dropped per image at the linear rule's rates."""

import pytest
import torch
from small_batches import batch_of, photographs, run_layers
from tiny import tiny

from megavis.config.errors import UserError
from megavis.model.dropout import drop_path_of
from megavis.model.layer_state import LayerState

COUNT = 2000
PIXELS = 3
"""Side of an iGPT image."""
GIVT = "latent_channels: 4, downsampling: 4, num_components: 2"
OBJECTIVES = {
    "igpt": "{name: igpt, vocabulary_size: 12}",
    "givt": f"{{name: givt, {GIVT}, adapter_blocks: 2, num_classes: 0}}",
    "givt_encoder_decoder": f"{{name: givt_encoder_decoder, {GIVT}, encoder_layers: 1,"
    " encoder_patch_size: 4, tokenizer: vae}",
    "darl": "{name: darl, patch_size: 4, loss: diffusion}",
    "gvp": "{name: gvp, patch_size: 4, num_groups: 3}",
    "mp3": "{name: mp3, patch_size: 4}",
}
FINETUNE = (
    "finetune={num_classes: 3}",
    "data.validation=shards/validation",
    "training.validate_every=1",
)


@pytest.fixture
def make(build_paper):
    """Build a four-block model of the named paper."""

    def make(name, *words):
        model = {"num_layers": 4, "hidden_size": 8, "add_bias": True}
        size = PIXELS if name == "igpt" else 12
        text = tiny(OBJECTIVES[name], model=model, data={"image_size": size})
        return build_paper(text, *words)

    return make


class Latents:
    """A VAE whose latents are all zero."""

    target_kind = None

    def to(self, device):
        return self

    def encode(self, images):
        return torch.zeros(len(images), 2, 4, 3, 3)


def samples_of(objective, name, count=COUNT):
    if name == "igpt":
        return batch_of(torch.zeros(count, PIXELS**2, dtype=torch.int64))
    if name == "givt":
        return batch_of(torch.zeros(count, 2, 4, 3, 3).half())
    paper = objective.backbone
    paper.reads.__dict__["tokenizer"] = Latents()
    return batch_of(photographs(1, 12).expand(count, -1, -1, -1))


def add_constants(block):
    """Make attention add 1 to all hidden states, the MLP 10 and cross-attention 100."""
    layers = {"self_attention.linear_proj": 1, "mlp.linear_fc2": 10}
    if block.core.has_memory:
        layers["cross_attention.linear_proj"] = 100
    for name, constant in layers.items():
        torch.nn.init.zeros_(block.get_submodule(name).weight)
        torch.nn.init.constant_(block.get_submodule(name).bias, constant)
    return len(layers)


@torch.no_grad()
def kept_parts(objective, inference, batch, rates):
    """Run the blocks in training mode; return which images keep which branch: bool `[b, p]`."""
    embedding, *blocks, _ = inference.layers.of_phase("step")
    state = embedding.train()(objective.training_sequence(batch).inputs)
    for layer in inference.layers.of_phase("once"):  # an encoder has no drop path
        state = layer.train()(state)
    kept = []
    for block, rate in zip(blocks, rates, strict=True):
        num_parts, before = (
            add_constants(block),
            LayerState.unpack(state, block.core.carried_names).hidden,
        )
        state = block.train()(state)
        after = LayerState.unpack(state, block.core.carried_names).hidden
        # Kept branches are scaled by 1 / (1 - rate).
        added = (after - before[-len(after) :]) * (1 - rate)
        digits = added[0, :, 0].round().long()
        torch.testing.assert_close(
            added, digits[None, :, None].expand_as(added).float(), atol=0.01, rtol=0
        )
        kept.append(torch.stack([digits // 10**part % 10 == 1 for part in range(num_parts)], 1))
    return kept


def linear_rule(rate, num_layers):
    """Return 1 - p_l = l / L · (1 - p_L), with l = 0 for the first block (timm, MAE)."""
    return torch.linspace(0, rate, num_layers).tolist()


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        (("model.drop_path=0.3",), 0.3),
        ((*FINETUNE, "model.drop_path=0.3"), 0.3),
        ((*FINETUNE, "finetune.drop_path=0.3"), 0.3),
        ((*FINETUNE, "model.drop_path=0.15", "finetune.drop_path=0.3"), 0.3),
        ((*FINETUNE, "model.drop_path=0.3", "finetune.drop_path=0"), 0.0),
    ],
    ids=["pretraining", "inherited", "own", "replaced", "none"],
)
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_drop_rates_follow_the_linear_rule(make, name, words, rate):
    objective, inference = make(name, *words)
    rates = linear_rule(rate, 4)
    for share, kept in zip(
        rates, kept_parts(objective, inference, samples_of(objective, name), rates), strict=True
    ):
        # Five standard deviations of the mean; branches are dropped independently.
        near = 5 * (share * (1 - share) / COUNT) ** 0.5
        assert ((~kept).float().mean(0) - share).abs().max() <= near
        both = (~kept[:, 0] & ~kept[:, 1]).float().mean().item()
        assert abs(both - share**2) <= 5 * (share**2 * (1 - share**2) / COUNT) ** 0.5
    assert [drop_path_of(number, 4, rate) for number in (1, 2, 3, 4)] == pytest.approx(rates)


def test_no_drop_in_evaluation_and_per_sample_drop_in_training(make):
    objective, inference = make("igpt", "model.drop_path=0.5")
    plain, same = make("igpt")
    batch = batch_of(torch.arange(PIXELS**2).expand(6, -1) % 12)
    with torch.no_grad():
        assert torch.equal(
            inference.predictions(objective.sequence(batch).inputs),
            same.predictions(plain.sequence(batch).inputs),
        )
        layers = [module.train() for module in inference.layers.modules]
        whole = run_layers(layers, objective.training_sequence(batch).inputs)
        part = run_layers(layers, objective.training_sequence(batch_of(batch.inputs[4:], 4)).inputs)
    torch.testing.assert_close(whole[:, 4:], part)


def test_linear_evaluation_requires_zero_drop_path(make):
    words = (*FINETUNE, "finetune.linear_evaluation=true", "model.drop_path=0.1")
    with pytest.raises(UserError, match=r"finetune\.drop_path: must be 0, not 0\.1"):
        make("igpt", *words)
    assert make("igpt", *words, "finetune.drop_path=0")
