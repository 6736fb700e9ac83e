"""What AIM's presets train on, row by row: "Scalable Pre-training of Large Autoregressive Image
Models". Its appendix D, which has decay rates, weight decay and warm-up, is not compared.
"""

import pytest
from protocols import IMAGENET_LABELS, contradictions, differences

pytestmark = pytest.mark.once

PAPER = "aim"

# Table 1: width, layers, and steps for 0.5 T or 1.2 T patches of 4,096 images of 256 patches.
SIZES = {
    "600m": (1536, 24, 500_000),
    "1b": (2048, 24, 1_200_000),
    "3b": (3072, 24, 1_200_000),
    "7b": (4096, 32, 1_200_000),
}
COLUMNS = dict(zip(("AIM-0.6B", "AIM-1B", "AIM-3B", "AIM-7B"), SIZES, strict=True))


def shape_of(size):
    """Sections 4.1 and 4.2: no biases, an MLP head of 12 blocks × 2048, images of 224²."""
    width, layers, _ = SIZES[size]
    return {
        "model.hidden_size": width,
        "model.num_layers": layers,
        "model.add_bias": False,
        "objective.patch_size": 14,
        "objective.head.num_layers": 12,
        "objective.head.hidden_size": 2048,
        "data.image_size": 224,
    }


def pretraining(size):
    """Section 4.2: AdamW, cosine, rate 1e-3, batches of 4,096; a fifth is ImageNet (section 3)."""
    return {
        **shape_of(size),
        "objective.attention": "prefix",
        "objective.order": "raster",
        "objective.normalize_targets": True,
        "data.scale": (0.4, 1.0),
        "optimizer.learning_rate": 1e-3,
        "schedule.decay": "cosine",
        "training.steps": SIZES[size][2],
        "training.batch_size": 4096,
        "training.precision": "bf16",
        "finetune": None,
    }


def probing(size, **keys):
    """Section 4.2: full attention, a frozen trunk, pooling by attention."""
    return {
        **IMAGENET_LABELS,
        **shape_of(size),
        "finetune.visibility": "full",
        "finetune.read_out": "attention",
        "finetune.linear_evaluation": True,
        **keys,
    }


ROWS = {f"Table 1: aim_vit_{size}": [pretraining(size)] for size in SIZES}
# The released code averages six layers; its best ones end at these.
BEST = {"600m": 20, "1b": 18, "3b": 18, "7b": 20}
for column, size in COLUMNS.items():
    for row, layer in ((1, None), (2, BEST[size])):
        keys = {"finetune.average": 6, "finetune.layer": layer}
        ROWS[f"Table 7, {row} {column}"] = [pretraining(size), probing(size, **keys)]


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


def test_a_fifth_of_the_images_is_from_imagenet(rows):
    for size in SIZES:
        ((config,),) = rows[f"Table 1: aim_vit_{size}"]
        weights = {each.path: each.weight for each in config.data.train}
        assert weights == {"shards/dfn_2b": 0.8, "shards/imagenet_jpeg/train": 0.2}
        assert not differences(config, {"data.validation": "shards/imagenet_jpeg/validation"})
