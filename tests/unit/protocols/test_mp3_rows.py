"""What MP3's presets train on, row by row: "Position Prediction as an Effective Pretraining
Strategy".
"""

import pytest
from protocols import IMAGENET, IMAGENET_LABELS, ROOT, contradictions

from megavis.config.load import load_config
from megavis.papers import build_objective
from megavis.planning.parameters import count_parameters

pytestmark = pytest.mark.once

PAPER = "mp3"


def size(layers, width, heads):
    """Return the keys of a ViT of DeiT (Table 1: "defined according to (Touvron et al., 2021)")."""
    shape = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {f"model.{key}": value for key, value in {**shape, "mlp_size": 4 * width}.items()}


VIT_S, VIT_B, VIT_L = size(12, 384, 6), size(12, 768, 12), size(24, 1024, 16)
# Table 1: side, examples and patches; section 4.2: η and batch for each of the three.
SETS = {
    "imagenet": {
        **IMAGENET,
        **VIT_B,
        "data.image_size": 224,
        "data.crop": "random_resized",
        "data.scale": (0.08, 1.0),
        "objective.patch_size": 16,
        "objective.mask_ratio": 0.75,
        "training.batch_size": 2048,
    },
    # DeiT's code crops images of 32² by a shift of up to 4 pixels.
    "cifar100": {
        **VIT_S,
        "data.train": "shards/cifar100_jpeg/train",
        "data.validation": "shards/cifar100_jpeg/test",
        "images": 50_000,
        "data.image_size": 32,
        "data.crop": "shifted",
        "data.border": "zeros",
        "objective.patch_size": 4,
        "objective.mask_ratio": 0.5,
        "training.batch_size": 256,
    },
    "tiny": {
        **VIT_B,
        "data.train": "shards/tiny_imagenet_jpeg/train",
        "data.validation": "shards/tiny_imagenet_jpeg/validation",
        "images": 100_000,
        "data.image_size": 64,
        "data.crop": "random_resized",
        "data.scale": (0.08, 1.0),
        "objective.patch_size": 8,
        "objective.mask_ratio": 0.8,
        "training.batch_size": 512,
    },
}
LABELS = {
    "imagenet": IMAGENET_LABELS,
    "cifar100": {
        "data.validation": "shards/cifar100_jpeg/selection",
        "finetune.test": "shards/cifar100_jpeg/test",
        "finetune.num_classes": 100,
    },
    "tiny": {
        "data.validation": "shards/tiny_imagenet_jpeg/selection",
        "finetune.test": "shards/tiny_imagenet_jpeg/validation",
        "finetune.num_classes": 200,
    },
}
# Section 4.2, "largely follow DeiT": AdamW, decay 0.05, drop path 0.1, RandAugment; DeiT's rate of
# 5e-4 · batch / 512 and 5 epochs of warm-up. Section 3.2: no positions.
PRE = {
    "warmup_epochs": 5,
    "schedule.decay": "cosine",
    "optimizer.algorithm": "adam",
    "optimizer.betas": (0.9, 0.999),
    "optimizer.weight_decay": 0.05,
    "drop_path": 0.1,
    "data.flip": True,
    "data.rand_augment": (9, 0.5),
    "data.random_erasing": 0.0,
    "data.repeats": 1,
    "model.positions": None,
    "objective.given_ratio": 0.0,
    "finetune": None,
}
# Section 3.3: learned positions, the class token is read, all patches are seen. Section 4.2:
# CutMix, Mixup, Random Erasing, Repeated Augmentation and label smoothing, as DeiT has them.
TUNE = {
    **PRE,
    "model.positions": "learned",
    "data.random_erasing": 0.25,
    "data.repeats": 3,
    "finetune.read_out": "first",
    "finetune.label_smoothing": 0.1,
    "finetune.mixup": 0.8,
    "finetune.cutmix": 1.0,
    "finetune.layer_decay": 1.0,
    "finetune.linear_evaluation": False,
}
del TUNE["finetune"]
# Epochs of pre-training in Tables 3 and 4, and of fine-tuning and of the baseline (section 4.2).
EPOCHS = {"imagenet": (100, 150), "cifar100": (2000, 400), "tiny": (2000, 400)}


def rate(name):
    return {"optimizer.learning_rate": 5e-4 * SETS[name]["training.batch_size"] / 512}


def pre(name, **keys):
    return {**SETS[name], **PRE, **rate(name), "epochs": EPOCHS[name][0], **keys}


def tune(name, **keys):
    recipe = {**SETS[name], **TUNE, **LABELS[name], **rate(name)}
    return {**recipe, "epochs": EPOCHS[name][1], **keys}


def both(name, before, tuned, **keys):
    """Return pre-training and fine-tuning, with keys of one, of the other and of both."""
    return [pre(name, **before, **keys), tune(name, **tuned, **keys)]


def scratch(name, **keys):
    """Return the supervised baseline: 400 epochs, 300 on ImageNet (section 4.2)."""
    epochs = 300 if name == "imagenet" else 400
    return [tune(name, **{"epochs": epochs, "finetune.from_run": None, **keys})]


IMAGE_ROWS = {}
POSITIONS = {"absolute": "learned", "2D relative": "relative_2d", "none": "none"}
NONE = {"model.positions": "none"}

# Table 1, and Table 3: rows 2 to 4 are baselines, 7 to 9 MP3, by positions of fine-tuning.
STEMS = {"imagenet": "vit_b_imagenet", "cifar100": "vit_s_cifar100", "tiny": "vit_b_tiny_imagenet"}
for name, stem in STEMS.items():
    IMAGE_ROWS[f"Table 1: mp3_{stem}"] = [pre(name)]
for name, column in (("cifar100", "CIFAR-100"), ("tiny", "Tiny ImageNet")):
    for row, positions in enumerate(POSITIONS.values()):
        keys = {"model.positions": positions}
        IMAGE_ROWS[f"Table 3, {2 + row} {column}"] = scratch(name, **keys)
        IMAGE_ROWS[f"Table 3, {7 + row} {column}"] = both(name, {}, keys)
    # Figure 4: epochs of pre-training, "with everything else fixed".
    stem = f"Figure 4: mp3_{STEMS[name]}"
    for epochs in (100, 500, 1000):
        runs = both(name, {"epochs": epochs}, {})
        IMAGE_ROWS[f"{stem}_{epochs}"] = runs[:1]
        IMAGE_ROWS[f"{stem}_{epochs}_finetune"] = runs
    IMAGE_ROWS[f"{stem}_finetune"] = both(name, {}, {})

# Table 4, and figures of the same models. Figure 5: epochs of fine-tuning.
TUNED = both("imagenet", {}, {})
WITHOUT = both("imagenet", {}, {**NONE, "epochs": 300})
LARGE = both("imagenet", {"epochs": 150}, {}, **VIT_L)
IMAGE_ROWS |= {
    "Table 4, 1": scratch("imagenet"),
    "Table 4, 2": scratch("imagenet", **NONE),
    "Table 4, 8": TUNED,
    "Table 4, 9": WITHOUT,
    "Table 4, 13": LARGE,
    "Section 4.2.3, 3": TUNED,
    "Figure 5: mp3_vit_b_imagenet_finetune": TUNED,
    "Figure 11: mp3_vit_b_imagenet_finetune": TUNED,
    "Figure 11: mp3_vit_b_imagenet_finetune_none": WITHOUT,
    "Figure 11: mp3_vit_b_imagenet_scratch": scratch("imagenet"),
}
for epochs in (60, 100, 300):
    name = f"Figure 5: mp3_vit_b_imagenet_finetune_{epochs}"
    IMAGE_ROWS[name] = both("imagenet", {}, {"epochs": epochs})
# Models of η = 0.75, 0 and 0.5. Figure 8: "trained with masking ratio η = 0".
RATIOS = {"": 0.75, "_0": 0.0, "_0.5": 0.5}
DRAWN = {2: [""], 3: ["", "_0"], 8: ["_0"], 9: [*RATIOS], 10: [""], 11: [""], 12: ["_0.5"]}
for figure, suffixes in {**DRAWN, 13: [""], 14: [""], 15: [""]}.items():
    for suffix in suffixes:
        keys = {"objective.mask_ratio": RATIOS[suffix]}
        IMAGE_ROWS[f"Figure {figure}: mp3_vit_b_imagenet{suffix}"] = [pre("imagenet", **keys)]
ZERO = {"objective.mask_ratio": 0.0}
name = "Figure 8: mp3_vit_b_imagenet_0_finetune"
IMAGE_ROWS[name] = both("imagenet", {}, {}, **ZERO)
IMAGE_ROWS[f"{name}_none"] = both("imagenet", {}, {**NONE, "epochs": 300}, **ZERO)

# Figure 6: 200 epochs over η. Figure 7: 1000 epochs, patches of one half and of twice the side.
for ratio in (0, 0.3, 0.5, 0.75, 0.9):
    runs = both("cifar100", {"epochs": 200}, {}, **{"objective.mask_ratio": float(ratio)})
    IMAGE_ROWS[f"Figure 6: mp3_vit_s_cifar100_200_{ratio}"] = runs[:1]
    IMAGE_ROWS[f"Figure 6: mp3_vit_s_cifar100_200_{ratio}_finetune"] = runs
for patch, run in ((2, "patch_2"), (4, "1000"), (8, "patch_8")):
    keys = {"objective.patch_size": patch}
    runs = both("cifar100", {"epochs": 1000}, {}, **keys)
    IMAGE_ROWS[f"Figure 7: mp3_vit_s_cifar100_{run}"] = runs[:1]
    IMAGE_ROWS[f"Figure 7: mp3_vit_s_cifar100_{run}_finetune"] = runs
    suffix = "" if patch == 4 else f"_{run}"
    IMAGE_ROWS[f"Figure 7: mp3_vit_s_cifar100_scratch{suffix}"] = scratch("cifar100", **keys)

# Table 7, appendix B: pre-trained for 150 epochs with η = 0.75. It prints no recipe, number of
# epochs or batch: docs/papers/mp3.md has ours.
TRANSFER = tune("imagenet")
for key in ("images", "epochs", "warmup_epochs", "training.batch_size", "optimizer.learning_rate"):
    del TRANSFER[key]
for row, (name, classes) in enumerate((("cifar10", 10), ("cars", 196)), start=1):
    keys = {
        "data.train": f"shards/{name}_jpeg/train",
        "data.validation": f"shards/{name}_jpeg/selection",
        "finetune.test": f"shards/{name}_jpeg/test",
        "finetune.num_classes": classes,
    }
    IMAGE_ROWS[f"Table 7, {row} MP3"] = [pre("imagenet", epochs=150), {**TRANSFER, **keys}]

# Rows of MAE's models. Table 4: its own recipe, 1600 epochs and 100, or 150 and 150 by the authors;
# rows 11 and 12 are tests/unit/test_claimed_protocols.py's, and so is row 6 of Table 3.
MAE = {**IMAGENET, **VIT_B, "objective.mask_ratio": 0.75, "training.batch_size": 4096}
MAE_TUNE = {**IMAGENET_LABELS, **VIT_B, "training.batch_size": 1024}
MAE_LARGE = {"objective.normalize_targets": False, **VIT_L}
IMAGE_ROWS |= {
    "Table 4, 6": [{**MAE, "epochs": 1600}, {**MAE_TUNE, "epochs": 100}],
    "Table 4, 7": [{**MAE, "epochs": 150}, {**MAE_TUNE, "epochs": 150}],
}
for row, epochs in ((11, 200), (12, 1600)):
    first = {**MAE, **MAE_LARGE, "epochs": epochs}
    IMAGE_ROWS[f"Table 4, {row}"] = [first, {**MAE_TUNE, **MAE_LARGE, "epochs": 50}]
for name, column in (("cifar100", "CIFAR-100"), ("tiny", "Tiny ImageNet")):
    # "The same number of pretraining epochs" (Table 3); mask ratio and rate were searched.
    same = {key: SETS[name][key] for key in SETS[name] if key.split(".")[0] in ("model", "images")}
    same |= {key: SETS[name][key] for key in ("data.train", "data.validation", "data.image_size")}
    same |= {"objective.patch_size": SETS[name]["objective.patch_size"]}
    first = {**same, "epochs": 2000}
    IMAGE_ROWS[f"Table 3, 6 {column}"] = [first, {**same, **LABELS[name], "epochs": 400}]

# Section 4.3: 8 layers of 32 and 64, dropout 0.1, Adam, 256 recordings, 500 steps at 1e-4, then
# 1e-3, halved every 10,000 steps; η = 0 with 5 % of the positions; early stopping.
SPEECH = {
    "data.train": "shards/speech_commands/train",
    "data.validation": "shards/speech_commands/validation",
    "data.frames": (100, 40),
    "model.num_layers": 8,
    "model.hidden_size": 32,
    "model.mlp_size": 64,
    "model.hidden_dropout": 0.1,
    "model.positions": "sincos",
    "objective.mask_ratio": 0.0,
    "objective.given_ratio": 0.05,
    "optimizer.algorithm": "adam",
    "optimizer.learning_rate": 1e-3,
    "optimizer.weight_decay": 0.0,
    "schedule.decay": "constant",
    "schedule.warmup_steps": 500,
    "schedule.warmup_rate": 1e-4,
    "schedule.halve_every": 10_000,
    "training.batch_size": 256,
    "training.steps": 10_000,
    "finetune": None,
}
# 30,000 steps with label smoothing; 12 classes (Table 1).
WORDS = {
    **SPEECH,
    "training.steps": 30_000,
    "finetune.num_classes": 12,
    "finetune.read_out": "first",
    "finetune.label_smoothing": 0.1,
    "finetune.test": "shards/speech_commands/test",
}
del WORDS["finetune"]
UNPLACED = {"objective.given_ratio": 0.0, "model.positions": "none"}
SPEECH_ROWS = {
    "Table 1: mp3_speech_commands": [SPEECH],
    "Table 5, 2": [{**WORDS, "finetune.from_run": None}],
    "Table 5, 3": [SPEECH, WORDS],
    "Section 4.3: mp3_speech_commands_no_positions": [{**SPEECH, **UNPLACED}],
}
for thousands in (1, 5, 10, 25, 50):
    first = {**SPEECH, "training.steps": 1000 * thousands}
    SPEECH_ROWS[f"Table 6, 1 {thousands}K"] = [first, WORDS]

ROWS = IMAGE_ROWS | SPEECH_ROWS


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    # Section 4.2.3 averages an MP3 and an MAE run; the latter is Table 4's.
    chains = [c for c in rows[row] if "mae" not in c[0].name or row != "Section 4.2.3, 3"]
    assert not contradictions(chains, ROWS[row])


def test_the_other_run_of_section_4_2_3_is_table_4s(rows):
    assert rows["Section 4.2.3, 3"][1] == max(rows["Table 4, 7"], key=len)


@pytest.mark.parametrize("row", ["Table 5, 2", "Table 5, 3"])
def test_speech_stops_early(rows, row):
    """Section 4.3: "early stopping is done based on validation accuracy", in both trainings."""
    for config in max(rows[row], key=len):
        assert (config.finetune or config.training).patience


# "Averaged across the ImageNet-1K validation set" (appendix D, Figure 10), "on the validation sets"
# (section 4.2.2, Figure 3).
@pytest.mark.parametrize("figure", ["Figure 3", "Figure 9", "Figure 10"])
def test_figures_read_the_validation_set(commands, figure):
    assert {args.num_images for args in commands[figure]} == {50_000}


# Table 1: positions; section 4.3: "around 70K parameters in total".
@pytest.mark.parametrize(
    ("name", "positions"),
    [("vit_s_cifar100", 64), ("vit_b_tiny_imagenet", 64), ("vit_b_imagenet", 196)],
)
def test_patches_of_table_1(name, positions):
    config = load_config(ROOT / "yaml_configs" / "mp3" / f"{name}.yaml").config
    assert (config.data.image_size // config.objective.patch_size) ** 2 == positions


def test_speech_model_has_70_000_parameters(context):
    path = ROOT / "yaml_configs" / "mp3" / "speech_commands_finetune.yaml"
    matrices = count_parameters(build_objective(load_config(path).config, context))
    assert sum(m.parameters for m in matrices) == pytest.approx(70e3, rel=0.01)
