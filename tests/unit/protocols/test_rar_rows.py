"""What RAR's presets train on, row by row: "Randomized Autoregressive Visual Generation"."""

import pytest
from protocols import IMAGENET, contradictions

pytestmark = pytest.mark.once

PAPER = "rar"

# Table 1: layers, width and width of the MLP; all have 16 heads.
SIZES = {
    "b": (24, 768, 3072),
    "l": (24, 1024, 4096),
    "xl": (32, 1280, 5120),
    "xxl": (40, 1408, 6144),
}
# Table 6, as 400 epochs of 625 steps. Section 4.1: QK LayerNorm, adaLN, and 256 ids of 1,024.
RECIPE = {
    **IMAGENET,
    "data.image_size": 256,
    "data.flip": True,
    "objective.patch_size": 16,
    "objective.vocabulary_size": 1024,
    "objective.num_classes": 1000,
    "objective.label_dropout": 0.1,
    "objective.randomness": (200 / 400, 300 / 400),
    "objective.order": "raster",
    "objective.adaptive_norms": "class_and_row",
    "model.num_attention_heads": 16,
    "model.qk_norm": True,
    "model.hidden_dropout": 0.1,
    "model.mlp_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "optimizer.learning_rate": 4e-4,
    "optimizer.betas": (0.9, 0.96),
    "optimizer.weight_decay": 0.03,
    "optimizer.gradient_clipping": 1.0,
    "optimizer.ema_decay": 0.0,
    "schedule.decay": "cosine",
    "schedule.min_rate": 1e-5,
    "schedule.warmup_steps": 62_500,
    "training.steps": 250_000,
    "training.batch_size": 2048,
    "training.precision": "bf16",
    "finetune": None,
}


def pretraining(size):
    layers, width, inner = SIZES[size]
    sizes = {
        "model.num_layers": layers,
        "model.hidden_size": width,
        "model.ffn_hidden_size": inner,
    }
    return {**RECIPE, **sizes}


# The tokenizer, and RAR on its ids.
VQGAN = {**IMAGENET, "objective.name": "vqgan", "objective.codebook_size": 1024}
ROWS = {}
for row, size in enumerate(SIZES, 34):
    chain = [{**VQGAN, "data.image_size": 256}, pretraining(size)]
    ROWS |= dict.fromkeys(
        (f"Table 1: rar_{size}", f"Table 4, {row}", f"Table 6: rar_{size}"), chain
    )

# Table 6: temperature, guidance scale and power.
SAMPLING = {
    34: (1.0, 16.0, 2.75),
    35: (1.02, 15.5, 2.5),
    36: (1.02, 6.9, 1.5),
    37: (1.02, 8.0, 1.2),
}


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


@pytest.mark.parametrize("row", SAMPLING)
def test_row_is_sampled_as_the_paper_says(commands, row):
    """Scale 1 is no guidance in the paper, weight 0 here."""
    (args,) = commands[f"Table 4, {row}"]
    found = (args.temperature or 1.0, 1 + args.guidance, args.guidance_power)
    assert found == pytest.approx(SAMPLING[row])
    assert args.num_images == 50_000
    assert args.top_k is None
    assert args.top_p is None
