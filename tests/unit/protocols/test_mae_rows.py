"""What MAE's presets train on, row by row: "Masked Autoencoders Are Scalable Vision Learners"."""

import pytest
from protocols import (
    ADE20K,
    BENCHMARKING,
    IMAGENET,
    IMAGENET_LABELS,
    contradictions,
    load_run,
)

from megavis.papers import build_objective
from megavis.planning.parameters import by_part, count_parameters

pytestmark = pytest.mark.once

PAPER = "mae"


def size(layers, width, heads, patch):
    """Return the keys of a ViT of "An Image is Worth 16x16 Words", table 1."""
    shape = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    model = {f"model.{key}": value for key, value in {**shape, "mlp_size": 4 * width}.items()}
    return {**model, "objective.patch_size": patch}


SIZES = {
    "ViT-B": size(12, 768, 12, 16),
    "ViT-L": size(24, 1024, 16, 16),
    "ViT-H": size(32, 1280, 16, 14),
}
STEMS = {"ViT-B": "vit_b16", "ViT-L": "vit_l16", "ViT-H": "vit_h14"}
# Default of section 4 (tables 1 and 2): 75 % masked, decoder of 8 blocks of 512.
DEFAULT = {
    "objective.mask_ratio": 0.75,
    "objective.decoder.num_layers": 8,
    "objective.decoder.hidden_size": 512,
    "objective.normalize_targets": True,
    "data.image_size": 224,
}
PIXELS = {"objective.normalize_targets": False}
# Table 8, base rate · batch / 256; "RandomResizedCrop" and flips.
PRE = {
    **IMAGENET,
    **DEFAULT,
    "finetune": None,
    "warmup_epochs": 40,
    "training.batch_size": 4096,
    "optimizer.learning_rate": 2.4e-3,
    "optimizer.weight_decay": 0.05,
    "data.crop": "random_resized",
    "data.scale": (0.2, 1.0),
    "data.flip": True,
}
# Table 9.
TUNE = {
    **IMAGENET_LABELS,
    **DEFAULT,
    "warmup_epochs": 5,
    "training.batch_size": 1024,
    "optimizer.weight_decay": 0.05,
    "data.rand_augment": (9, 0.5),
    "finetune.label_smoothing": 0.1,
    "finetune.mixup": 0.8,
    "finetune.cutmix": 1.0,
    "finetune.linear_evaluation": False,
    "finetune.tuned_blocks": None,
}
# Table 10: base rate 0.1.
PROBE = {
    **IMAGENET_LABELS,
    **DEFAULT,
    "epochs": 90,
    "warmup_epochs": 10,
    "training.batch_size": 16384,
    "optimizer.algorithm": "lars",
    "optimizer.learning_rate": 6.4,
    "data.rand_augment": None,
    "finetune.linear_evaluation": True,
}
# Table 11: base rate 1e-4.
SCRATCH = {
    **IMAGENET_LABELS,
    "warmup_epochs": 20,
    "training.batch_size": 4096,
    "optimizer.learning_rate": 1.6e-3,
    "optimizer.weight_decay": 0.3,
    "optimizer.ema_decay": 0.9999,
    "data.image_size": 224,
    "data.rand_augment": (9, 0.5),
    "finetune.from_run": None,
    "finetune.label_smoothing": 0.1,
}
# Epochs and drop path of Table 9, "B/L/H".
TABLE_9 = {"ViT-B": (100, 0.1), "ViT-L": (50, 0.1), "ViT-H": (50, 0.2)}
# Normalised pixels: epochs, rate, layer decay and drop path of the authors' FINETUNE.md.
NORMALIZED = {
    "ViT-B": (100, 2e-3, 0.65, 0.1),
    "ViT-L": (50, 4e-3, 0.75, 0.2),
    "ViT-H": (50, 4e-3, 0.75, 0.3),
}


def tune(model, words, **keys):
    """Return a column of Table 9: rate 1e-3 and decay 0.75, or FINETUNE.md's."""
    epochs, rate, decay, drop_path = NORMALIZED[model]
    if words == PIXELS:
        epochs, drop_path = TABLE_9[model]
        rate, decay = 4e-3, 0.75
    rates = {"optimizer.learning_rate": rate, "finetune.layer_decay": decay}
    found = {**TUNE, **SIZES[model], **words, "epochs": epochs, "drop_path": drop_path}
    return {**found, **rates, **keys}


def runs(model, epochs, words, column, before=None, **keys):
    """Return pre-training, whose keys `before` changes, and tuning (`ft`) or a probe (`lin`)."""
    first = {**PRE, **SIZES[model], **words, "epochs": epochs, **keys, **(before or {})}
    if column == "ft":
        return [first, tune(model, words, **keys)]
    return [first, {**PROBE, **SIZES[model], **words, **keys}]


ROWS = {}
# Table 1: ViT-L, 800 epochs, pixels that are not normalised.
DEPTHS = [{"objective.decoder.num_layers": depth} for depth in (1, 2, 4, 8, 12)]
WIDTHS = [{"objective.decoder.hidden_size": width} for width in (128, 256, 512, 768, 1024)]
for column in ("ft", "lin"):
    for table, settings in (("1a", DEPTHS), ("1b", WIDTHS)):
        for row, keys in enumerate(settings, start=1):
            ROWS[f"Table {table}, {row} {column}"] = runs("ViT-L", 800, PIXELS, column, **keys)
    default = runs("ViT-L", 800, PIXELS, column)
    for row in ("1c, 2", "1d, 1", "1e, 3", "1f, 1"):
        ROWS[f"Table {row} {column}"] = default
    ROWS[f"Table 1d, 2 {column}"] = runs("ViT-L", 800, {}, column)
    # "none", and random crops of a fixed size; fine-tuned as the others.
    none, fixed = {"data.crop": "center", "data.flip": False}, {"data.crop": "scaled"}
    ROWS[f"Table 1e, 1 {column}"] = runs("ViT-L", 800, PIXELS, column, before=none)
    ROWS[f"Table 1e, 2 {column}"] = runs("ViT-L", 800, PIXELS, column, before=fixed)
    # Block-wise and grid-wise masks.
    for row, shape, ratio in ((2, "blocks", 0.5), (3, "blocks", 0.75), (4, "grid", 0.75)):
        keys = {"objective.mask_shape": shape, "objective.mask_ratio": ratio}
        ROWS[f"Table 1f, {row} {column}"] = runs("ViT-L", 800, PIXELS, column, **keys)

# Table 2: 800 epochs; decoders of 8 blocks and of one.
for rows_of, model in (((2, 3), "ViT-L"), ((5, 6), "ViT-H")):
    for row, depth in zip(rows_of, (8, 1), strict=True):
        keys = {"objective.decoder.num_layers": depth}
        ROWS[f"Table 2, {row} ft acc"] = runs(model, 800, PIXELS, "ft", **keys)

# Figure 6: models of Table 1f.
for name, row in (("block_50", 2), ("grid_75", 4)):
    ROWS[f"Figure 6: mae_vit_l16_pixels_{name}"] = ROWS[f"Table 1f, {row} ft"][:1]
# Figure 5: mask ratio; Figure 7: epochs; Figure 9: blocks tuned for 50, 100 or 200 epochs.
ENDS = {"finetune": "ft", "linear": "lin"}
for number, ratio in ((10, 0.1), (90, 0.9)):
    name, keys = f"Figure 5: mae_vit_l16_pixels_ratio_{number}", {"objective.mask_ratio": ratio}
    ROWS[name] = runs("ViT-L", 800, PIXELS, "ft", **keys)[:1]
    for end, column in ENDS.items():
        ROWS[f"{name}_{end}"] = runs("ViT-L", 800, PIXELS, column, **keys)
for epochs in (100, 1600):
    name = f"Figure 7: mae_vit_l16_pixels_{epochs}"
    ROWS[name] = runs("ViT-L", epochs, PIXELS, "ft")[:1]
    for end, column in ENDS.items():
        ROWS[f"{name}_{end}"] = runs("ViT-L", epochs, PIXELS, column)
for blocks, epochs in ((1, 200), (4, 100)):
    first, tuned = runs("ViT-L", 800, PIXELS, "ft")
    tuned |= {"finetune.tuned_blocks": blocks, "epochs": epochs}
    ROWS[f"Figure 9: mae_vit_l16_pixels_finetune_last_{blocks}"] = [first, tuned]

# Tables 3, 7, 12 and 13: 1600 epochs.
for model, stem in STEMS.items():
    tuned = runs(model, 1600, {}, "ft")
    scratch_epochs = 300 if model == "ViT-B" else 200
    drop_path = 0.1 if model == "ViT-B" else 0.2
    scratch = {**SCRATCH, **SIZES[model], "epochs": scratch_epochs, "drop_path": drop_path}
    ROWS[f"Table 3, 1 {model}"] = ROWS[f"Table 11: mae_{stem}_scratch"] = [scratch]
    ROWS[f"Table 13, 8 {model}"] = [scratch]
    for row in ("Table 3, 5", "Table 7, 2", "Table 13, 4"):
        ROWS[f"{row} {model}"] = tuned
    ROWS[f"Table 7, 1 {model}"] = runs(model, 1600, PIXELS, "ft")
    # The presets of ViT-L are Table 1's, of 800 epochs.
    epochs = 800 if model == "ViT-L" else 1600
    ROWS[f"Table 8: mae_{stem}"] = runs(model, epochs, {}, "ft")[:1]
    ROWS[f"Table 9: mae_{stem}_finetune"] = runs(model, epochs, {}, "ft")
    ROWS[f"Table 10: mae_{stem}_linear"] = runs(model, epochs, {}, "lin")
    ROWS[f"Table 12, {4 + list(STEMS).index(model)}"] = runs(model, 1600, {}, "lin")
ROWS["Table 9: mae_vit_l16_pixels_finetune"] = runs("ViT-L", 800, PIXELS, "ft")
ROWS["Table 10: mae_vit_l16_pixels_linear"] = runs("ViT-L", 800, PIXELS, "lin")
# Tables 5 and 7 on ADE20K: rate, layers and drop path of mmsegmentation's and BEiT's configs.
for model, layers, drop_path in (("ViT-B", (4, 6, 8, 12), 0.1), ("ViT-L", (8, 12, 16, 24), 0.2)):
    segment = {
        **ADE20K,
        **SIZES[model],
        "optimizer.learning_rate": 1e-4,
        "finetune.layers": layers,
        "drop_path": drop_path,
    }
    for row, keys in (("Table 5, 4", {}), ("Table 7, 2 ADE20K", {}), ("Table 7, 1 ADE20K", PIXELS)):
        before = runs(model, 1600, keys, "ft")[0]
        ROWS[f"{row} {model}"] = [before, {**segment, **keys}]
# Tables 4 and 7 on COCO: 100 epochs; drop path of MIMDet's and detectron2's configs.
for model, blocks, drop_path in (("ViT-B", (3, 6, 9, 12), 0.1), ("ViT-L", (6, 12, 18, 24), 0.4)):
    detect = {
        **BENCHMARKING,
        **SIZES[model],
        "training.steps": 184_375,
        "finetune.global_blocks": blocks,
        "drop_path": drop_path,
    }
    for row, keys in (
        ("Table 4, 4 box", {}),
        ("Table 4, 4 mask", {}),
        ("Table 7, 2 COCO", {}),
        ("Table 7, 1 COCO", PIXELS),
    ):
        before = runs(model, 1600, keys, "ft")[0]
        ROWS[f"{row} {model}"] = [before, {**detect, **keys}]
# Fine-tuned at 448², from 224².
for row in ("Table 3, 5", "Table 13, 4"):
    first, tuned = runs("ViT-H", 1600, {}, "ft")
    ROWS[f"{row} ViT-H448"] = [first, {**tuned, "data.image_size": 448}]
for figure in (2, 10, 11):
    ROWS[f"Figure {figure}: mae_vit_b16"] = ROWS["Table 8: mae_vit_b16"]


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


# Table 12: parameters in millions.
@pytest.mark.parametrize(
    ("name", "millions"), [("vit_b16", 86), ("vit_l16", 304), ("vit_h14", 632)]
)
def test_encoders_have_the_sizes_of_table_12(context, name, millions):
    config = load_run("mae", f"{name}_linear")
    parts = by_part(count_parameters(build_objective(config, context)))
    encoder = sum(number for part, number in parts.items() if part != "head")
    assert encoder / 1e6 == pytest.approx(millions, rel=0.01)
