"""Random batches have the format of a config's shards."""

import pytest
import torch
from tiny import VIT, tiny

from megavis.training.bench import random_batch


@pytest.mark.parametrize(
    "objective",
    [
        "{name: igpt, vocabulary_size: 5}",
        "{name: compose, reads: {kind: colors, vocabulary_size: 5}, schedule: {kind: one_by_one},"
        " asks: {kind: shift}, density: {kind: categorical}}",
    ],
)
def test_random_ids_cover_the_vocabulary(build_paper, objective):
    paper, _ = build_paper(tiny(objective))
    ids = random_batch(paper, 4, seed=1).inputs
    assert ids.flatten().unique().tolist() == [0, 1, 2, 3, 4]


INSTANCES = {"task": "instances", "head_width": 16, "window": 4, "global_blocks": [2, 4]}


def tuned(build_paper, finetune):
    text = tiny(
        "{name: mae, patch_size: 8}",
        model={**VIT, "num_layers": 4, "hidden_size": 32, "num_attention_heads": 2},
        validates=True,
        data={"image_size": 64, "crop": "jittered"},
        training={"validate_every": 1},
        finetune={"num_classes": 5, **finetune},
    )
    return build_paper(text)[0]


@pytest.mark.parametrize(
    "finetune",
    [
        {"task": "classes", "mixup": 0.8},
        {"task": "segments", "head_width": 16},
        INSTANCES,
    ],
)
def test_fine_tuning_reads_random_batches(build_paper, finetune):
    paper = tuned(build_paper, finetune)
    first, second = (random_batch(paper, 2, seed=seed) for seed in (0, 1))
    assert (first.inputs != second.inputs).any()
    sequence = paper.training_sequence(first)
    blank = paper.blank_sequence(2, torch.device("cpu"))
    forms = [
        [(tensor.shape, tensor.dtype) for tensor in (*each.inputs, *each.targets)]
        for each in (sequence, blank)
    ]
    assert forms[0] == forms[1]


def test_random_objects_are_rectangles(build_paper):
    paper = tuned(build_paper, INSTANCES)
    classes, masks = random_batch(paper, 3).objects
    assert classes.eq(1).all()
    assert masks.unique().tolist() == [0, 255]
    rows, columns = masks.bool().any(3), masks.bool().any(2)
    assert (masks.bool() == rows[..., :, None] & columns[..., None, :]).all()
    for lines in (rows, columns):
        # Neighbouring lines differ where the rectangle begins and ends.
        edges = (lines[..., 1:] != lines[..., :-1]).sum(2)
        assert lines.any(2).all()
        assert (edges <= 2).all()
    assert len({bytes(mask.numpy().tobytes()) for mask in masks.flatten(0, 1)}) > 10
