"""What iGPT's presets train on, row by row: "Generative Pretraining from Pixels"."""

import pytest
from protocols import ROOT, contradictions

from megavis.config.load import load_config
from megavis.config.section import MixedSource
from megavis.papers import build_objective
from megavis.planning.parameters import count_parameters

pytestmark = pytest.mark.once

PAPER = "igpt"

# Section 3.1: 4 % of ImageNet's 1,281,167 training images are the "experimental validation set";
# the numbers are of models retrained on all (docs/papers/igpt.md and the presets' headers).
IMAGENET = {
    "data.train": "shards/imagenet_96/train",
    "data.validation": "shards/imagenet_96/validation",
    "images": 1_229_920,
}
# "The ILSVRC 2012 validation set as our test set".
IMAGENET_LABELS = {
    **IMAGENET,
    "finetune.num_classes": 1000,
    "finetune.test": "shards/imagenet_jpeg/validation",
}
# Section 3.1: a shorter side of 256 to 384, then a random 224² crop, without mirror images.
CROPS = {
    "data.crop": "scaled",
    "data.short_sides": (256, 384),
    "data.crop_size": 224,
    "data.flip": False,
    "data.rand_augment": None,
}
# Section 3.3: layers and width. Table 5: rates, auto-regressive and BERT's, by side.
SIZES = {"s": (24, 512), "m": (36, 1024), "l": (48, 1536), "xl": (60, 3072)}
RATES = {("s", 32): 0.003, ("m", 32): 0.003, ("l", 32): 0.001, ("l", 48): 0.01, ("xl", 64): 0.0003}
BERT_RATES = {"s": 0.01, "m": 0.003, "l": 0.001}
# Section 3.4: Adam, no dropout; appendix A.1: no weight decay, and 0.95 for the second moment.
TRAINED = {
    "objective.vocabulary_size": 512,
    "objective.order": "raster",
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "optimizer.algorithm": "adam",
    "optimizer.betas": (0.9, 0.95),
    "optimizer.weight_decay": 0.0,
    "training.batch_size": 128,
}
# "For our largest model, we use an additional 100 million unlabeled web images" (section 3), and
# "no data augmentation" of them (section 3.1).
WEB = (
    MixedSource(path="shards/imagenet_96/train", weight=1.23),
    MixedSource(path="shards/web/train", weight=100, crop="center"),
)


def model(size, side, mode="autoregressive"):
    """Return what pre-training and evaluations have in common."""
    layers, width = SIZES[size]
    return {
        **TRAINED,
        "model.num_layers": layers,
        "model.hidden_size": width,
        "objective.mode": mode,
        "data.image_size": side,
        "training.batch_size": 64 if size == "xl" else 128,
    }


def pre(size, side, mode="autoregressive", **keys):
    """Return pre-training: 1M steps of 128, or 2M of 64; an epoch of warm-up (section 3.4)."""
    rate = BERT_RATES[size] if mode == "bert" else RATES[size, side]
    data = {**IMAGENET, "data.train": WEB} if size == "xl" else IMAGENET
    return {
        **data,
        **CROPS,
        **model(size, side, mode),
        "training.steps": 2_000_000 if size == "xl" else 1_000_000,
        "warmup_epochs": 1,
        "optimizer.learning_rate": rate,
        "schedule.decay": "cosine",
        "objective.mask_ratio": 0.15,
        "finetune": None,
        **keys,
    }


def probe(size, side, mode="autoregressive", **keys):
    """Return a probe by SGD with momentum 0.9, 10,000,000 steps, rate 30 (section 3.4)."""
    return {
        **IMAGENET_LABELS,
        **CROPS,
        **model(size, side, mode),
        "training.steps": 10_000_000,
        "schedule.warmup_steps": 0,
        "schedule.decay": "cosine",
        "optimizer.algorithm": "sgd",
        "optimizer.betas": (0.9, 0.0),
        "optimizer.learning_rate": 30.0,
        "finetune.linear_evaluation": True,
        "finetune.concatenate": 1,
        "finetune.read_out": "mean",
        "finetune.visibility": "kept",
        **keys,
    }


# Sections 2.3 and 3.4: both losses, no schedule, early stopping. Section 4.5: a rate "often an
# order of magnitude smaller".
TUNED = {
    "schedule.decay": "constant",
    "schedule.warmup_steps": 0,
    "finetune.linear_evaluation": False,
    "finetune.generative_weight": 1.0,
    "finetune.read_out": "mean",
    "finetune.visibility": "kept",
}


def tune(side, mode="autoregressive", **keys):
    """Return iGPT-L's fine-tuning on ImageNet."""
    return {
        **IMAGENET_LABELS,
        **CROPS,
        **model("l", side, mode),
        **TUNED,
        "optimizer.learning_rate": RATES["l", side] / 10,
        **keys,
    }


def small(name, classes, mode="autoregressive", **keys):
    """Return iGPT-L's fine-tuning on CIFAR: 90 % of its training set, shifted by up to 4 pixels."""
    return {
        **model("l", 32, mode),
        **TUNED,
        "data.train": f"shards/{name}_32/train",
        "data.validation": f"shards/{name}_32/validation",
        "data.crop": "shifted",
        "data.border": "reflect",
        "data.flip": True,
        "optimizer.learning_rate": 1e-4,
        "finetune.num_classes": classes,
        "finetune.test": f"shards/{name}_32/test",
        **keys,
    }


L_32 = pre("l", 32)
BERT = pre("l", 32, "bert")
ROWS = {}

# Table 1, Figure 2 and Table 4: features of iGPT-L at 32²; tests/unit/test_claimed_protocols.py has
# the probes. Figure 3: all sizes at 32².
for row in ("Table 1, 3", "Table 1, 6", "Table 1, 8", "Table 4, 3", "Figure 2: igpt_l_32"):
    ROWS[row] = [L_32]
for size in ("s", "m", "l"):
    ROWS[f"Figure 3: igpt_{size}_32"] = [pre(size, 32)]

# Table 2: the best layer's features, and five layers' of iGPT-XL. Section 4.4: by size.
ROWS |= {
    "Table 2, 2": [L_32, probe("l", 32)],
    "Table 2, 4": [pre("l", 48), probe("l", 48)],
    "Table 2, 7": [pre("xl", 64), probe("xl", 64)],
    "Table 2, 10": [pre("xl", 64), probe("xl", 64, **{"finetune.concatenate": 5})],
}
for row, size in enumerate(("s", "m", "l"), start=1):
    ROWS[f"Section 4.4, {row}"] = [pre(size, 32), probe(size, 32)]

# Table 3, sections 4.5 and 4.6. From random weights: "the classification objective" for 18 epochs,
# "with tuned learning rate and dropout", which are not printed.
SCRATCH = tune(48, **{"epochs": 18, "finetune.from_run": None, "finetune.generative_weight": 0.0})
for key in ("optimizer.learning_rate", "model.hidden_dropout", "model.attention_dropout"):
    del SCRATCH[key]
ROWS |= {
    "Table 3, 4": [L_32, small("cifar10", 10)],
    "Table 3, 5": [L_32, small("cifar100", 100)],
    "Sections 4.5 and 4.6, 1": [L_32, tune(32)],
    "Sections 4.5 and 4.6, 2": [pre("l", 48), tune(48)],
    "Sections 4.5 and 4.6, 3": [SCRATCH],
    "Sections 4.5 and 4.6, 4": [BERT, tune(32, "bert")],
    "Sections 4.5 and 4.6, 5": [BERT, small("cifar10", 10, "bert")],
}

# Figure 4: both objectives, by probe and fine-tuning.
for name, mode, first in (("l_32", "autoregressive", L_32), ("l_32_bert", "bert", BERT)):
    ROWS |= {
        f"Figure 4: igpt_{name}": [first],
        f"Figure 4: igpt_{name}_linear": [first, probe("l", 32, mode)],
        f"Figure 4: igpt_{name}_finetune_imagenet": [first, tune(32, mode)],
        f"Figure 4: igpt_{name}_finetune_cifar10": [first, small("cifar10", 10, mode)],
    }

# Section 4.7: four labels per class, without augmentation.
FEW = {"data.images_per_class": 4, "data.crop": "none", "data.flip": False}
ROWS["Section 4.7, 1"] = [L_32, small("cifar10", 10, **FEW)]

# Appendix A.1: "we also tried higher masking rates of 20%, 25%, 30%, and 35%". Table 5: rates.
for ratio in (0.2, 0.25, 0.3, 0.35):
    keys = {"objective.mask_ratio": ratio}
    ROWS[f"Appendix A.1: igpt_l_32_bert_{ratio}"] = [pre("l", 32, "bert", **keys)]
for size, side in RATES:
    ROWS[f"Table 5: igpt_{size}_{side}"] = [pre(size, side)]
for size in BERT_RATES:
    ROWS[f"Table 5: igpt_{size}_32_bert"] = [pre(size, 32, "bert")]


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


def test_fine_tuning_stops_early(rows):
    """Section 3.4: "early stop once we reach the maximum validation accuracy"."""
    tuned = [chain[-1] for chains in rows.values() for chain in chains]
    tuned = [c for c in tuned if c.finetune and not c.finetune.linear_evaluation]
    assert len(tuned) > 8
    assert all(config.finetune.patience for config in tuned)


# Section 3.3, Table 2: millions of parameters. At 48² and 64² there are more positions.
@pytest.mark.parametrize(
    ("name", "millions"),
    [("s_32", 76), ("m_32", 455), ("l_32", 1362), ("l_48", 1362), ("xl_64", 6801)],
)
def test_models_have_the_printed_sizes(context, name, millions):
    config = load_config(ROOT / "yaml_configs" / "igpt" / f"{name}.yaml").config
    matrices = count_parameters(build_objective(config, context))
    assert sum(m.parameters for m in matrices) / 1e6 == pytest.approx(millions, rel=0.01)
    assert config.model.num_layers == SIZES[name.split("_")[0]][0]


@pytest.mark.parametrize(("name", "features"), [("l_32", 1536), ("xl_64", 3072)])
def test_features_of_a_layer_are_table_2s(name, features):
    config = load_config(ROOT / "yaml_configs" / "igpt" / f"{name}_linear.yaml").config
    assert config.model.hidden_size * config.finetune.concatenate == features
