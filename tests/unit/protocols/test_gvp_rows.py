"""What GVP's presets train on, row by row: "Bridging Autoregressive and Masked Modeling for
Enhanced Visual Representation Learning".
"""

import pytest
from protocols import ADE20K, BENCHMARKING, IMAGENET, IMAGENET_LABELS, contradictions

from megavis.commands.probe import read_data_sets

pytestmark = pytest.mark.once

PAPER = "gvp"

SHAPE = {"model.num_layers": 12, "model.hidden_size": 768, "model.num_attention_heads": 12}
# Section 5: ViT-B, 200 epochs with 10 of warm-up, base rate 1.5e-4 · batch / 256, crops of 0.2 to
# 1, orders drawn from all permutations; mixed lengths of 20 groups are the best of Table 4.
PRE = {
    **IMAGENET,
    **SHAPE,
    "epochs": 200,
    "warmup_epochs": 10,
    "training.batch_size": 4096,
    "optimizer.learning_rate": 2.4e-3,
    "schedule.decay": "cosine",
    "data.image_size": 224,
    "data.crop": "random_resized",
    "data.scale": (0.2, 1.0),
    "data.flip": True,
    "finetune": None,
}
GVP = {
    "objective.variant": "p2p",
    "objective.order": "random",
    "objective.segmentation": "mixed",
    "objective.num_groups": 20,
}
# MAE's fine-tuning and linear probing of ViT-B: its Tables 9 and 10, and FINETUNE.md.
TUNE = {
    **IMAGENET_LABELS,
    **SHAPE,
    "epochs": 100,
    "warmup_epochs": 5,
    "training.batch_size": 1024,
    "optimizer.learning_rate": 2e-3,
    "data.image_size": 224,
    "data.rand_augment": (9, 0.5),
    "finetune.linear_evaluation": False,
    "finetune.visibility": "full",
}
# "For linear probing, we keep the causal mask" (section 5).
PROBE = {
    **IMAGENET_LABELS,
    **SHAPE,
    "epochs": 90,
    "warmup_epochs": 10,
    "training.batch_size": 16384,
    "optimizer.learning_rate": 6.4,
    "data.image_size": 224,
    "data.rand_augment": None,
    "finetune.linear_evaluation": True,
    "finetune.visibility": "kept",
}
EVALUATED = {"FT": TUNE, "LP": PROBE}
# Ids of images of 256² for 16 × 16 tokens; the tokenizer trains on ImageNet.
VQGAN = {**IMAGENET, "objective.name": "vqgan", "data.image_size": 256}
IDS = {"objective.variant": "d2d", "data.image_size": 256}
P2D = {"objective.variant": "p2d"}

ROWS = {}


def add(row, first=(), epochs=None, words=GVP, **keys):
    """Add both columns of a row: tokenizer, pre-training, evaluation."""
    longer = {} if epochs is None else {"epochs": epochs, "warmup_epochs": epochs // 20}
    for column, evaluated in EVALUATED.items():
        ROWS[f"{row} {column}"] = [
            *first,
            {**PRE, **longer, **words, **keys},
            {**evaluated, **words, **keys},
        ]


# Table 1: from scratch on pixels and on tokens, then the variants.
for row, first, keys in ((1, [], {}), (2, [VQGAN], IDS)):
    for column, evaluated in EVALUATED.items():
        ROWS[f"Table 1, {row} {column}"] = [
            *first,
            {**evaluated, **keys, "finetune.from_run": None},
        ]
add("Table 1, 11")
add("Table 1, 12", [VQGAN], **P2D)
add("Table 1, 13", [VQGAN], **IDS)
# Table 2: features of the models of Table 1.
ROWS["Table 2, 2"] = ROWS["Table 1, 11 LP"][:1]
ROWS["Table 2, 4"] = ROWS["Table 1, 12 LP"][:2]
# Table 3.
add("Table 3, 1", **{"objective.order": "raster"})
add("Table 3, 2")
# Table 4: segmentation and K.
SEGMENTATIONS = {"fixed": (1, 5, 20, 40, 196), "random": (5, 20, 40), "mixed": (5, 20, 40)}
PAIRS = [(kind, number) for kind, numbers in SEGMENTATIONS.items() for number in numbers]
for row, (kind, number) in enumerate(PAIRS, start=1):
    keys = {"objective.segmentation": kind, "objective.num_groups": number}
    add(f"Table 4, {row}", **keys)
# Table 5, appendix C: 800 epochs, 40 of warm-up.
add("Table 5, 5", epochs=800)
add("Table 5, 6", [VQGAN], epochs=800, **P2D)
# Table 6: "the same setting of BEiT", whose ViT-B has rate 7e-4.
SEGMENT = {
    **ADE20K,
    **SHAPE,
    "optimizer.learning_rate": 7e-4,
    "finetune.layers": (4, 6, 8, 12),
    "drop_path": 0.1,
}
ROWS["Table 6, 4"] = [{**PRE, **GVP}, {**SEGMENT, **GVP}]
ROWS["Table 6, 5"] = [VQGAN, {**PRE, **GVP, **P2D}, {**SEGMENT, **GVP, **P2D}]
# Table 9: 25 epochs of "ViT Benchmarking (Li et al., 2021)".
DETECT = {
    **BENCHMARKING,
    **SHAPE,
    "training.steps": 46_093,
    "finetune.visibility": "full",
    "finetune.global_blocks": (3, 6, 9, 12),
    "drop_path": 0.1,
}
ROWS["Table 9, 3"] = [{**PRE, **GVP}, {**DETECT, **GVP}]
# Table 10: +causal masks, +two streams, +mixed lengths; row 1 cites SimMIM, two models serve it.
GROUPS = {"objective.segmentation": "fixed", "objective.num_groups": 196}
add("Table 10, 2", **GROUPS, **{"objective.streams": "one"})
add("Table 10, 3", **GROUPS, **{"objective.streams": "two"})
add("Table 10, 4", **{"objective.streams": "two"})
add("Table 10, 1", words={})
# Table 11: p2d with K = 20.
for row, kind in enumerate(("fixed", "random", "mixed"), start=1):
    add(f"Table 11, {row}", [VQGAN], **P2D, **{"objective.segmentation": kind})

# Table 7: ImageNet-100, 200 epochs. Its 126,689 images: docs/papers/gvp.md.
SMALL = {"data.train": "shards/imagenet100_jpeg/train", "images": 126_689}
SMALL_PRE = {**PRE, **SMALL, "data.validation": "shards/imagenet100_jpeg/validation"}
SMALL_PROBE = {
    **PROBE,
    **SMALL,
    "data.validation": "shards/imagenet100_jpeg/selection",
    "finetune.test": "shards/imagenet100_jpeg/validation",
    "finetune.num_classes": 100,
}
FEATURES = {"objective.condition_size": 256}
ALONE = {key: value for key, value in SMALL_PROBE.items() if key not in SHAPE}
del ALONE["finetune.visibility"]
ROWS |= {
    "Table 7, 1": [{**SMALL_PRE, **GVP}, {**SMALL_PROBE, **GVP}],
    "Table 7, 2": [VQGAN, ALONE],
    "Table 7, 3": [VQGAN, {**SMALL_PRE, **GVP, **FEATURES}, {**SMALL_PROBE, **GVP, **FEATURES}],
    # Table 8 and Figure 2: reconstructions by the models of Table 1.
    "Table 8, 2": ROWS["Table 2, 2"],
    "Table 8, 4": ROWS["Table 1, 13 LP"][:2],
    "Figure 2: gvp_vit_b_p2p": ROWS["Table 2, 2"],
}


def test_every_claimed_row_has_a_protocol(rows):
    assert set(rows) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_trains_as_the_paper_says(rows, row):
    assert not contradictions(rows[row], ROWS[row])


def test_table_2_transfers_to_the_nine_data_sets(commands):
    """Section 5.1; Ericsson et al. take the mean per class for four of them."""
    names = ["aircraft", "caltech101", "cars", "cifar10", "cifar100", "dtd", "flowers", "food"]
    for row in (2, 4):
        (args,) = commands[f"Table 2, {row}"]
        assert list(read_data_sets(args.data_sets)) == [*names, "pets"]
        # Features of the last layer, and the mean accuracy of the classes for four data sets.
        assert args.layers == "12"
        assert args.per_class == ("aircraft", "caltech101", "flowers", "pets")
