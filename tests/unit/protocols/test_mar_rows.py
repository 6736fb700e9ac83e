"""What MAR's presets train on, row by row: "Autoregressive Image Generation without Vector
Quantization"."""

import pytest
from protocols import IMAGENET, contradictions

pytestmark = pytest.mark.once

PAPER = "mar"

# Appendix B: 24, 32 and 40 blocks, half of them in the decoder (section 4.2), and their width. In
# Table 4, blocks and width of the MLP. Heads are the released code's.
SIZES = {
    "b": (12, 768, 12, 6, 1024),
    "l": (16, 1024, 16, 8, 1280),
    "h": (20, 1280, 16, 12, 1536),
}
# Section 4 and appendix B, as 800 epochs of 625 steps. Dropout, clipping and four noises a token
# are the released code's.
RECIPE = {
    **IMAGENET,
    "data.image_size": 256,
    "data.flip": True,
    "objective.latent_channels": 16,
    "objective.downsampling": 16,
    "objective.num_classes": 1000,
    "objective.label_dropout": 0.1,
    "objective.class_rows": 64,
    "objective.least_masking": 0.7,
    "objective.masking_deviation": 0.25,
    "objective.noises_per_token": 4,
    "objective.sampling_steps": 100,
    "objective.sampling_temperature": 1.0,
    "model.hidden_dropout": 0.1,
    "model.mlp_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "optimizer.learning_rate": 8e-4,
    "optimizer.betas": (0.9, 0.95),
    "optimizer.weight_decay": 0.02,
    "optimizer.decay_embeddings": True,
    "optimizer.gradient_clipping": 3.0,
    "optimizer.ema_decay": 0.9999,
    "schedule.decay": "constant",
    "schedule.warmup_steps": 62_500,
    "training.steps": 500_000,
    "training.batch_size": 2048,
    "training.precision": "bf16",
    "finetune": None,
}


def pretraining(size, **keys):
    layers, width, heads, denoiser_layers, denoiser_width = SIZES[size]
    return {
        **RECIPE,
        "model.num_layers": layers,
        "model.hidden_size": width,
        "model.num_attention_heads": heads,
        "objective.decoder.num_layers": layers,
        "objective.decoder.hidden_size": width,
        "objective.decoder.num_attention_heads": heads,
        "objective.denoiser_layers": denoiser_layers,
        "objective.denoiser_width": denoiser_width,
        **keys,
    }


def ablation(width=1024):
    """Return MAR-L in 400 epochs with an MLP of three blocks (sections 4.1 and 5)."""
    keys = {"objective.denoiser_layers": 3, "objective.denoiser_width": width}
    return {**pretraining("l"), "training.steps": 250_000, **keys}


# The tokenizer, and MAR on its latents.
VAE = {**IMAGENET, "objective.name": "vae", "objective.latent_channels": 16}
VAE_256 = {**VAE, "data.image_size": 256}
ROWS = {
    **dict.fromkeys(
        ("Table 1, 11", "Table 1, 15", "Table 2, 9", "Table 3, 5"), [VAE_256, ablation()]
    ),
    **{
        f"Table 3, {row}": [VAE_256, ablation(width)]
        for row, width in ((1, 256), (3, 512), (7, 1536))
    },
    **{
        f"Table 4, {row}": [VAE_256, pretraining(size)]
        for row, size in ((20, "b"), (21, "b"), (22, "l"), (23, "l"), (24, "h"), (25, "h"))
    },
    "Table 6, 15": [VAE_256, pretraining("l", **{"data.image_size": 512})],
    "Figure 7: mar_h": [VAE_256, pretraining("h")],
}

# The released commands: rounds, guidance scale and temperature.
SAMPLING = {
    20: (256, 1.0, 0.95),
    21: (256, 2.9, 1.0),
    22: (256, 1.0, 0.95),
    23: (256, 3.0, 1.0),
    24: (256, 1.0, 0.95),
    25: (256, 3.2, 1.0),
}


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


@pytest.mark.parametrize("row", SAMPLING)
def test_row_is_sampled_as_the_released_command_says(commands, row):
    """Scale 1 is no guidance there, weight 0 here."""
    (args,) = commands[f"Table 4, {row}"]
    found = (args.rounds, 1 + (args.guidance or 0), args.temperature or 1.0)
    assert found == pytest.approx(SAMPLING[row])
    assert (args.guidance_schedule == "linear") == (SAMPLING[row][1] > 1)
    assert args.num_images == 50_000
