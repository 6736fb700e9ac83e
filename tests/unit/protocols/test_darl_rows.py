"""What DARL's presets train on, row by row: "Denoising Autoregressive Representation Learning"."""

import pytest
from protocols import COCO, IMAGENET, IMAGENET_LABELS, contradictions

pytestmark = pytest.mark.once

PAPER = "darl"


def size(layers, width, heads, patch):
    """Return the keys of a standard ViT (section 4)."""
    shape = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    model = {f"model.{key}": value for key, value in {**shape, "mlp_size": 4 * width}.items()}
    return {**model, "objective.patch_size": patch}


SIZES = {"b16": size(12, 768, 12, 16), "l16": size(24, 1024, 16, 16), "h14": size(32, 1280, 16, 14)}
L16 = SIZES["l16"]
ROPE = {"model.positions": "rope_2d", "model.position_scale": 1.0}
MSE = {"objective.loss": "mse", "objective.decoder": "linear"}
# One Transformer block without γ (section 4.1); a = 0.03, b = 1 (Table 5).
DIFF = {
    "objective.loss": "diffusion",
    "objective.decoder": "transformer",
    "objective.decoder_layers": 1,
    "objective.condition_on_gamma": False,
    "objective.noise_a": 0.03,
    "objective.noise_b": 1.0,
    "objective.predicts": "clean",
}
LOSSES = {"mse": MSE, "diff": DIFF}
# Table 8; 224² and spatial augmentation (section 4); total_lr = base_lr × batch_size / 256.
PRE = {
    **IMAGENET,
    **ROPE,
    "finetune": None,
    "data.image_size": 224,
    "data.crop": "random_resized",
    "data.flip": True,
    "data.rand_augment": None,
    "training.batch_size": 4096,
    "warmup_epochs": 40,
    "optimizer.learning_rate": 2.4e-3,
    "optimizer.weight_decay": 0.05,
    "schedule.decay": "cosine",
    "objective.inputs": "pixels",
    "objective.order": "raster",
    "objective.two_streams": False,
    "objective.normalize_targets": False,
}
# Table 9; the last patch without causal mask (section 4).
TUNE = {
    **PRE,
    **IMAGENET_LABELS,
    "data.rand_augment": (9, 0.5),
    "finetune.mixup": 0.8,
    "finetune.cutmix": 1.0,
    "finetune.label_smoothing": 0.1,
    "finetune.layer_decay": 0.75,
    "finetune.read_out": "last",
    "finetune.visibility": "full",
    "warmup_epochs": 5,
}
del TUNE["finetune"]
RATES = {"b16": (1e-3, 0.0), "l16": (1e-3, 0.1), "h14": (3e-3, 0.2)}
# Table 10; global mean pooling (appendix A.2), without the causal mask unless the row says so.
SUPERVISED = {
    **TUNE,
    **L16,
    "epochs": 200,
    "warmup_epochs": 20,
    "optimizer.learning_rate": 1.6e-3,
    "optimizer.weight_decay": 0.3,
    "drop_path": 0.2,
    "finetune.from_run": None,
    "finetune.layer_decay": 1.0,
    "finetune.read_out": "mean",
}
CAUSAL = {"finetune.visibility": "kept"}
# Table 13, appendix B.1: mean pooling under the causal mask.
LINEAR = {
    **PRE,
    **IMAGENET_LABELS,
    "epochs": 90,
    "warmup_epochs": 10,
    "training.batch_size": 16384,
    "optimizer.algorithm": "lars",
    "optimizer.weight_decay": 0.0,
    "finetune.linear_evaluation": True,
    "finetune.label_smoothing": 0.1,
    "finetune.read_out": "mean",
    **CAUSAL,
}
del (
    LINEAR["finetune"],
    LINEAR["optimizer.learning_rate"],
)  # 0.1, with and without the batch's factor


def pre(name, loss, epochs, **keys):
    return {**PRE, **SIZES[name], **LOSSES[loss], "epochs": epochs, **keys}


def tune(name, loss, epochs, **keys):
    """Return a column of Table 9: 50 epochs without drop path, or 90."""
    rate, drop_path = RATES[name]
    rates = {"optimizer.learning_rate": rate, "drop_path": 0.0 if epochs == 50 else drop_path}
    return {**TUNE, **SIZES[name], **LOSSES[loss], "epochs": epochs, **rates, **keys}


def both(name, loss, epochs, tuned, **keys):
    return [pre(name, loss, epochs, **keys), tune(name, loss, tuned, **keys)]


ROWS = {}

# Table 1: supervised 200 epochs; MSE 400 epochs and 50 of fine-tuning, ViT-L/16. "Unsupervised +
# causal": the causal mask of pre-training; fine-tuned as section 4 says, without it.
POSITIONS = {1: "none", 2: "sincos", 3: "learned", 4: "rope_1d", 5: "rope_2d"}
for row, positions in POSITIONS.items():
    keys = {"model.positions": positions}
    ROWS[f"Table 1, {row} supervised"] = [{**SUPERVISED, **keys}]
    ROWS[f"Table 1, {row} supervised + causal"] = [{**SUPERVISED, **keys, **CAUSAL}]
    ROWS[f"Table 1, {row} unsupervised + causal"] = both("l16", "mse", 400, 50, **keys)
# "Evaluate with resolution 384": supervised models as they are; the others fine-tuned at 384²,
# positions interpolated by 14 / 24 along an axis and 196 / 576 along the sequence.
for row, positions, scale in ((6, "rope_1d", 0.340278), (7, "rope_2d", 0.583333)):
    keys = {"model.positions": positions}
    ROWS[f"Table 1, {row} supervised"] = [{**SUPERVISED, **keys}]
    ROWS[f"Table 1, {row} supervised + causal"] = [{**SUPERVISED, **keys, **CAUSAL}]
    large = {**keys, "data.image_size": 384, "model.position_scale": scale}
    ROWS[f"Table 1, {row} unsupervised + causal"] = [
        pre("l16", "mse", 400, **keys),
        tune("l16", "mse", 50, **large),
    ]

# Table 2 and Figure 3: 100 epochs, 50 of fine-tuning; a sweep changes the decoder or schedule.
for item, sweep, loss, keys in (
    ("Table 2", "_mlp", "mse", {"objective.decoder": "mlp"}),
    ("Table 2", "_decoders", "diff", {}),
    ("Table 2", "_linear", "diff", {"objective.decoder": "linear"}),
    ("Figure 3", "", "diff", {}),
    ("Figure 5", "", "diff", {}),
):
    ROWS[f"{item}: darl_vit_l16_{loss}_100{sweep}"] = [pre("l16", loss, 100, **keys)]
    ROWS[f"{item}: darl_vit_l16_{loss}_finetune_50"] = both("l16", loss, 100, 50)

# Table 3: MSE for 100 epochs, fine-tuned for 50 with and without the mask.
for row, mask in ((1, "kept"), (2, "full")):
    for column, read_out in (("mean over tokens", "mean"), ("last token", "last")):
        keys = {"finetune.visibility": mask, "finetune.read_out": read_out}
        ROWS[f"Table 3, {row} {column}"] = [
            pre("l16", "mse", 100),
            tune("l16", "mse", 50, **keys),
        ]

# "Training Objective", section 4.1: what the denoising decoder predicts, 100 and 50 epochs.
for row, predicts in ((1, "clean"), (2, "noise")):
    keys = {"objective.predicts": predicts}
    ROWS[f"Section 4.1, {row}"] = both("l16", "diff", 100, 50, **keys)

# Table 4: ViT-L/16 pre-trained on ImageNet, Table 12. Classes as in "A Large-scale Study of
# Representation Learning with the Visual Task Adaptation Benchmark", table 2.
TASKS = {
    **{1: ("cifar100", 100), 2: ("caltech101", 102), 3: ("dtd", 47), 4: ("flowers", 102)},
    **{5: ("pets", 37), 6: ("svhn", 10), 7: ("sun397", 397)},
    **{9: ("camelyon", 2), 10: ("eurosat", 10), 11: ("resisc45", 45), 12: ("retinopathy", 5)},
    **{14: ("clevr_count", 8), 15: ("clevr_distance", 6), 16: ("dmlab", 6)},
    **{17: ("kitti_distance", 4), 18: ("dsprites_location", 16), 19: ("dsprites_orientation", 16)},
    **{20: ("smallnorb_azimuth", 18), 21: ("smallnorb_elevation", 9)},
}


def transfer(loss, name, classes):
    """Return the runs of a data set of VTAB: chosen on its validation set, scored on its test."""
    tuned = {
        **L16,
        **ROPE,
        **LOSSES[loss],
        "data.train": f"shards/{name}/train",
        "data.validation": f"shards/{name}/validation",
        "finetune.test": f"shards/{name}/test",
        "finetune.num_classes": classes,
        "data.image_size": 224,
        "training.batch_size": 256,
        "training.steps": 20_000,
        "schedule.warmup_steps": 3000,
        "schedule.decay": "cosine",
        "finetune.label_smoothing": 0.1,
        **CAUSAL,
    }
    return [pre("l16", loss, 800), tuned]


for loss, column in (("mse", "DARL (MSE)"), ("diff", "DARL (DIFF)")):
    for row, task in TASKS.items():
        ROWS[f"Table 4, {row} {column}"] = transfer(loss, *task)
    ROWS[f"Table 12: darl_vit_l16_{loss}_vtab"] = transfer(loss, *TASKS[1])

# Table 5: 800 epochs and 90 of fine-tuning; Tables 8, 9, 14 and 15 with the same models.
for name, model in (("b16", "ViT-B"), ("l16", "ViT-L"), ("h14", "ViT-H")):
    for row, loss in ((6, "mse"), (7, "diff")):
        ROWS[f"Table 5, {row} {model}"] = both(name, loss, 800, 90)
        ROWS[f"Table 8: darl_vit_{name}_{loss}"] = [pre(name, loss, 800)]
        ROWS[f"Table 9: darl_vit_{name}_{loss}_finetune"] = both(name, loss, 800, 90)
    column = f"{model}/{name[1:]}"
    ROWS[f"Table 14, 1 {column}"] = both(name, "mse", 800, 90)
    normalized = {"objective.normalize_targets": True}
    ROWS[f"Table 14, 2 {column}"] = both(name, "mse", 800, 90, **normalized)
    for suffix, rate in (("", 0.1), ("_scaled", 6.4)):
        probe = {**LINEAR, **SIZES[name], **DIFF, "optimizer.learning_rate": rate}
        ROWS[f"Table 13: darl_vit_{name}_diff_linear{suffix}"] = [pre(name, "diff", 800), probe]
ROWS["Figure 8: darl_vit_l16_diff_linear"] = ROWS["Table 13: darl_vit_l16_diff_linear"]
for loss in LOSSES:
    ROWS[f"Table 9: darl_vit_l16_{loss}_finetune_50"] = both("l16", loss, 100, 50)
ROWS["Table 10: darl_vit_l16_supervised"] = [SUPERVISED]

# Table 7: MSE, 100 and 50 epochs at 256², blocks of 2 × 2, 4 × 4 and 8 × 8 patches.
for row, order in ((1, "raster"), (2, "nested_raster"), (3, "round_robin")):
    for block in (2,) if order == "raster" else (2, 4, 8):
        keys = {"data.image_size": 256, "objective.order": order}
        if order != "raster":
            keys["objective.order_block"] = block
        ROWS[f"Table 7, {row} {block} × {block}"] = both("l16", "mse", 100, 50, **keys)
# Figures 10, 12 and 14: errors of these models by position.
for item, row, run in ((10, 1, "raster"), (12, 2, "nested_raster_2"), (14, 3, "round_robin_2")):
    ROWS[f"Figure {item}: darl_vit_l16_mse_100_{run}"] = ROWS[f"Table 7, {row} 2 × 2"][:1]

# Table 15: row 4 is ViT-L and row 5 ViT-H of Table 5; row 1 has the accuracies of Figure 4 at 100.
for loss, column in (("mse", "MSE"), ("diff", "DIFF")):
    for row, name, epochs in ((1, "l16", 100), (4, "l16", 800), (5, "h14", 800)):
        ROWS[f"Table 15, {row} {column} accuracy"] = both(name, loss, epochs, 90)
        if row > 1:
            ROWS[f"Table 15, {row} {column} loss"] = [pre(name, loss, epochs)]

# Table 16: supervised without mask; 100 epochs of pre-training. Ids of GVP's VQGAN here.
TOKENIZER = {**IMAGENET, "objective.name": "vqgan", "data.image_size": 256}
IDS = {"objective.inputs": "ids"}
ID_TARGETS = {"objective.loss": "ids", "objective.decoder": None}
ROWS |= {
    "Table 16, 1": [SUPERVISED],
    "Table 16, 2": [TOKENIZER, {**SUPERVISED, **IDS}],
    "Table 16, 3": both("l16", "mse", 100, 90),
    "Table 16, 4": both("l16", "diff", 100, 90),
    "Table 16, 5": [TOKENIZER, *both("l16", "mse", 100, 90, **IDS)],
    "Table 16, 6": [TOKENIZER, *both("l16", "mse", 100, 50, **ID_TARGETS)],
}

# Figure 4: 90 epochs of fine-tuning ("training schedule and model scaling studies", section 4).
for loss in LOSSES:
    ROWS[f"Figure 4: darl_vit_l16_{loss}_200"] = [pre("l16", loss, 200)]
    ROWS[f"Figure 4: darl_vit_l16_{loss}_200_finetune"] = both("l16", loss, 200, 90)
# Figure 5: patches of 32² as one of four; diffusion above, by a sweep.
PATCH = {"objective.patch_size": 32}
ROWS["Figure 5: darl_vit_l32_mse_100"] = [pre("l16", "mse", 100, **PATCH)]
ROWS["Figure 5: darl_vit_l32_mse_finetune_50"] = both("l16", "mse", 100, 50, **PATCH)
# Figure 6: two streams, MSE, 50 epochs of fine-tuning.
for run, order in (("two_streams", "raster"), ("random", "random")):
    keys = {"objective.two_streams": True, "objective.order": order}
    ROWS[f"Figure 6: darl_vit_l16_mse_{run}"] = [pre("l16", "mse", 800, **keys)]
    ROWS[f"Figure 6: darl_vit_l16_mse_{run}_finetune_50"] = both("l16", "mse", 800, 50, **keys)
# Figures 7 and 15, appendix F: 800 epochs at 64², ViT-L/8, 8 layers with γ, Beta(1, 1), T = 1000.
SAMPLES = {
    "data.image_size": 64,
    "objective.patch_size": 8,
    "objective.decoder_layers": 8,
    "objective.condition_on_gamma": True,
    "objective.noise_a": 1.0,
    "objective.sampling_steps": 1000,
}
for item in ("Figure 7", "Figure 15"):
    ROWS[f"{item}: darl_vit_l8_64_diff"] = [pre("l16", "diff", 800, **SAMPLES)]
# Table 11; windows and global blocks are ViTDet's (appendix A.3 names it).
DETECT = {
    **COCO,
    **L16,
    **DIFF,
    "model.positions": "rope_2d",
    "data.jitter": (0.1, 2.5),
    "drop_path": 0.4,
    "training.steps": 73_920,
    "schedule.warmup_steps": 256,
    "optimizer.learning_rate": 7.5e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.ema_decay": 0.9998,
    "finetune.layer_decay": 0.85,
    "finetune.detector": "cascade",
    "finetune.visibility": "full",
    "finetune.global_blocks": (6, 12, 18, 24),
}
for row in ("Table 6, 1 DARL (DIFF)", "Table 6, 2 DARL (DIFF)", "Table 11: darl_vit_l16_diff_coco"):
    ROWS[row] = [pre("l16", "diff", 800), DETECT]


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])
