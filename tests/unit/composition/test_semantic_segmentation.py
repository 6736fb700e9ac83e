"""Segmentation on top of a paper: rows on their grid, the loss, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_batches import batch_of
from tiny import VIT, tiny

from megavis.composition.segmentation import SegmentHead
from megavis.config.errors import UserError
from megavis.evaluation.segmentation import accuracy_of, confusion_of
from megavis.model.layer_state import LayerState

pytestmark = pytest.mark.once

SEGMENTS = "finetune: {task: segments, num_classes: 3, head_width: 8, head_dropout: 0.0}"
PAPERS = {
    "mae": "{name: mae, patch_size: 4}",
    "mp3": "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
    "gvp": "{name: gvp, patch_size: 4, num_groups: 3, num_condition_tokens: 2}",
    "darl": "{name: darl, patch_size: 4, order: nested_raster, order_block: 2}",
    "in_order": "{name: compose, reads: {kind: patches, patch_size: 4}, density:"
    " {kind: squared_error}, schedule: {kind: one_by_one}, asks: {kind: shift, place: content}}",
}


def config(name, finetune=SEGMENTS, **sections):
    text = tiny(PAPERS[name], model=VIT, **sections)
    held = "data.validation=held", "training.validate_every=1"
    return f"{text}\n{finetune}\n", held


def pairs(count=2, side=16):
    """Images and maps with classes 0 (void) to 3."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, side, side, 3), generator=random)
    maps = torch.zeros_like(images)
    maps[..., 0] = torch.randint(0, 4, (count, side, side), generator=random)
    return torch.stack([images, maps], dim=1).to(torch.uint8)


@pytest.mark.parametrize("name", list(PAPERS))
def test_every_patch_is_at_its_place(name, build_paper):
    """The tokens of patches whose pixels say where they are reach the cells that they came from."""
    text, words = config(name)
    objective, inference = build_paper(text, *words)
    places = torch.arange(16, dtype=torch.float32).view(4, 4)
    images = (
        places.repeat_interleave(4, 0)
        .repeat_interleave(4, 1)[None, ..., None]
        .expand(-1, -1, -1, 3)
    )
    sequence = objective.backbone.inputs_for_features((images * 10).to(torch.uint8), None)
    head = inference.layers.modules[-1]
    assert isinstance(head, SegmentHead)
    tokens = sequence[0]
    grammar = objective.backbone.grammar
    held = grammar.rows(16, for_features=True).blocks - grammar.num_front
    # Rows that hold a token, in the order of the rows: those of a start token hold none.
    values = tokens.float().mean(-1)[0]
    rows = torch.zeros(held, 1, 32)
    rows[held - len(values) :, 0] = values[:, None]
    grid = head._on_grid(rows)[0, 0]
    expected = (
        objective.backbone.reads.of((images * 10).to(torch.uint8)).float().mean(-1).view(4, 4)
    )
    if len(values) == 16:
        torch.testing.assert_close(grid, expected)
    else:
        # A row that predicts a patch holds the one before it; the last is never read.
        order = objective.backbone.schedule.for_features(torch.zeros(1, dtype=torch.int64)).order[0]
        flat = expected.flatten()
        for row, place in enumerate(order.tolist()[1:], 1):
            assert grid.flatten()[place] == pytest.approx(float(flat[order[row - 1]]))


def test_loss_is_the_mean_over_all_pixels(build_paper):
    text, words = config("mae", SEGMENTS.replace("}", ", auxiliary_weight: 0.25}"))
    objective, inference = build_paper(text, *words, std=0.1)
    batch = batch_of(pairs())
    sequence = objective.sequence(batch)
    own, auxiliary = inference.predictions(sequence.inputs)
    assert (own.shape, auxiliary.shape) == ((2, 3, 16, 16), (2, 3, 4, 4))
    nats = 0.0
    for logits, weight in ((own, 1.0), (auxiliary, 0.25)):
        large = F.interpolate(logits, size=(16, 16), mode="bilinear", align_corners=False).double()
        likely = large.log_softmax(1)
        for image in range(2):
            for row in range(16):
                for column in range(16):
                    number = int(batch.inputs[image, 1, row, column, 0])
                    if number:
                        nats -= weight * float(likely[image, number - 1, row, column])
    expected = nats / (2 * 16 * 16)
    assert float(objective.loss((own, auxiliary), sequence.targets)) == pytest.approx(
        expected, rel=1e-5
    )


def test_image_of_void_alone_has_no_loss_and_does_not_count(build_paper):
    text, words = config("mae")
    objective, inference = build_paper(text, *words, std=0.1)
    shown = pairs()
    shown[:, 1] = 0
    sequence = objective.sequence(batch_of(shown))
    predictions = inference.predictions(sequence.inputs)
    assert float(objective.loss(predictions, sequence.targets)) == 0.0
    assert objective.measures(predictions, sequence.targets)["accuracy"] == (0, 0)


def test_features_are_the_stream_after_each_block(build_paper, monkeypatch):
    text, words = config("mae", SEGMENTS.replace("}", ", layers: [1, 1, 2, 2]}"))
    objective, inference = build_paper(text, *words, std=0.1)
    *below, head = inference.layers.modules
    seen = []
    monkeypatch.setattr(head.pyramid, "forward", lambda grids: seen.extend(grids) or grids)
    monkeypatch.setattr(head.segments, "forward", lambda levels: levels[0])
    monkeypatch.setattr(head.auxiliary, "forward", lambda level: level)
    state = objective.sequence(batch_of(pairs())).inputs
    streams = []
    for layer in below:
        state = layer(state)
        streams.append(LayerState.unpack(state, objective.backbone.core.carried_names).hidden)
    head(state)
    assert head.below == []
    for grid, stream in zip(seen, (streams[1], streams[1], streams[2], streams[2]), strict=True):
        assert torch.equal(grid, stream[1:].permute(1, 2, 0).unflatten(2, (4, 4)))


@pytest.mark.parametrize(
    ("name", "finetune", "message"),
    [
        ("mae", "layers: [1, 2]", "finetune.layers: [1, 2] must be four numbers from 1 to 2"),
        ("mae", "layers: [1, 1, 2, 3]", "must be four numbers from 1 to 2"),
        ("mae", "mixup: 0.8", "finetune.mixup: applies only to finetune.task classes"),
        ("gvp", "num_classes: 3", None),
    ],
)
def test_keys_that_do_not_fit_are_refused(build_paper, name, finetune, message):
    given = SEGMENTS if message is None else SEGMENTS.replace("}", f", {finetune}}}")
    text, words = config(name, given)
    if message is None:
        build_paper(text, *words)
        return
    with pytest.raises(UserError) as refused:
        build_paper(text, *words)
    assert message in str(refused.value)


def test_keys_of_segments_are_refused_for_classes(build_paper):
    text, words = config("mae", "finetune: {num_classes: 3, head_width: 8}")
    with pytest.raises(UserError, match="head_width: applies only to finetune.task segments"):
        build_paper(text, *words)


def test_models_without_patches_or_with_drawn_features_are_refused(build_paper):
    text, words = config("gvp", SEGMENTS)
    with pytest.raises(UserError, match="hides random patches"):
        build_paper(text, *words, "objective.feature_order=drawn")
    igpt = tiny("{name: igpt, vocabulary_size: 12}", model=VIT)
    with pytest.raises(UserError, match="segments reads patches of an image"):
        build_paper(f"{igpt}\n{SEGMENTS}\n", *words)


def test_rows_of_places_are_refused(build_paper):
    text = tiny(
        "{name: compose, reads: {kind: patches, patch_size: 4}, schedule: {kind: one_by_one,"
        " order: random}, asks: {kind: instruct}, density: {kind: squared_error}}",
        model=VIT,
    )
    _, words = config("mae", SEGMENTS)
    with pytest.raises(UserError, match="asks instruct has rows of places too"):
        build_paper(f"{text}\n{SEGMENTS}\n", *words)


@pytest.mark.parametrize("measure", ["probe", "neighbors"])
def test_what_needs_features_is_not_evaluated_during_training(build_paper, measure):
    text, words = config("mae", SEGMENTS)
    with pytest.raises(UserError, match=f"evaluation.what: {measure} needs features of whole"):
        build_paper(text, *words, f"evaluation={{what: [{measure}]}}")


def test_confusion_matrix_gives_the_three_numbers():
    """Against counts by hand: class 2 never occurs and is never predicted, class 3 is one pixel."""
    classes = torch.tensor([[[0, 0, 1, 0], [1, 1, -1, 3]]])
    found = torch.tensor([[[0, 1, 1, 0], [1, 0, 2, 0]]])
    confusion = confusion_of(found, classes, 4).view(4, 4).numpy()
    assert confusion.tolist() == [[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    result = accuracy_of(confusion, 1)
    assert result.pixel_accuracy == pytest.approx(4 / 7)
    assert result.mean_accuracy == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert result.iou == (pytest.approx(2 / 5), pytest.approx(2 / 4), None, 0.0)
    assert result.mean_iou == pytest.approx((2 / 5 + 2 / 4 + 0) / 3)


def test_mean_iou_equals_torchmetrics():
    from torchmetrics.classification import MulticlassJaccardIndex

    random = np.random.default_rng(0)
    classes = torch.from_numpy(random.integers(-1, 5, (3, 20, 20)))
    found = torch.from_numpy(random.integers(0, 5, (3, 20, 20)))
    metric = MulticlassJaccardIndex(5, average="macro", ignore_index=-1)
    counted = confusion_of(found, classes, 5).view(5, 5).numpy()
    result = accuracy_of(counted, 3)
    assert result.mean_iou == pytest.approx(float(metric(found, classes)), rel=1e-5)
