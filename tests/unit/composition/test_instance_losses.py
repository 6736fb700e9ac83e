"""Detection on top of a paper: what a batch becomes, the accuracy, and what is refused."""

import ast
from importlib import util
from pathlib import Path

import pytest
import torch
from small_batches import photographs, run_layers
from tiny import VIT, tiny

import megavis
from megavis.composition.instances import NUM_LOSSES, objects_of
from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch

pytestmark = pytest.mark.once

MAE, CAUSAL = "{name: mae, patch_size: 4}", "{name: darl, patch_size: 4}"


def config(objective=MAE, side=32, crop="jittered", **keys):
    finetune = {"task": "instances", "num_classes": 3, "head_width": 8, **keys}
    return tiny(
        objective,
        model=VIT,
        data={"image_size": side, "crop": crop},
        training={"validate_every": 1},
        validates=True,
        finetune=finetune,
    )


def squares(masks, classes):
    """Return a batch whose objects are rectangles (top, left, bottom, right) of 32² pixels."""
    pixels = torch.zeros(len(masks), 4, 32, 32, dtype=torch.uint8)
    numbers = torch.zeros(len(masks), 4, dtype=torch.int64)
    for image, own in enumerate(masks):
        for place, (top, left, bottom, right) in enumerate(own):
            pixels[image, place, top:bottom, left:right] = 1
            numbers[image, place] = classes[image][place]
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
    packed = (pixels.unflatten(3, (4, 8)) * weights).sum(4).to(torch.uint8)
    count = len(masks)
    labels, index = torch.full((count,), -1), torch.arange(count)
    return Batch(photographs(count, 32), labels, index, objects=(numbers, packed))


def test_objects_have_the_boxes_of_their_masks():
    """To the pixel, and without the rows that fill up the batch."""
    rectangles = [(2, 3, 14, 20), (10, 0, 32, 32), (7, 9, 8, 10)]
    classes, masks = squares([rectangles], [[1, 3, 2]]).objects
    found = objects_of(classes[0], masks[0])
    assert found["labels"].tolist() == [1, 3, 2]
    assert found["boxes"].tolist() == [[x, y, x2, y2] for y, x, y2, x2 in rectangles]
    expected = torch.zeros(3, 32, 32)
    for mask, (top, left, bottom, right) in zip(expected, rectangles, strict=True):
        mask[top:bottom, left:right] = 1
    assert torch.equal(found["masks"].float(), expected)


def test_an_image_has_its_loss_in_any_batch(build_paper):
    """In training and validation, with draws by sample and not by place in the batch."""
    objective, inference = build_paper(
        config(window=4, global_blocks=[2], detector="cascade"), std=0.1
    )
    batch = squares([[(2, 2, 14, 20), (10, 4, 30, 28)], [], [(0, 0, 9, 9)]], [[1, 3], [], [2]])
    sequence = objective.sequence(batch)
    whole, *found = inference.predictions(sequence.inputs)
    assert whole.shape == (3, NUM_LOSSES)
    assert [tuple(part.shape[:2]) for part in found] == 4 * [(3, found[1].shape[1])]
    loss = objective.loss((whole, *found), sequence.targets)
    assert float(loss) == pytest.approx(float(whole.sum()) / 3, rel=1e-6)
    for image in (2, 0, 1):
        alone = inference.predictions(tuple(part[[image]] for part in sequence.inputs))[0]
        torch.testing.assert_close(alone[0], whole[image], rtol=1e-5, atol=1e-6)
    trained = run_layers([each.train() for each in inference.layers.modules], sequence.inputs)
    torch.testing.assert_close(trained, whole, rtol=1e-4, atol=1e-5)


def test_rates_fall_from_the_head_to_the_embedding(build_paper):
    objective, _ = build_paper(config(layer_decay=0.5))
    scales = [plan.options.learning_rate_scale for plan in objective.layer_plans()]
    assert scales == [0.125, 0.25, 0.5, 1.0]


def test_images_without_annotations_give_detections_alone(build_paper):
    objective, inference = build_paper(config(), std=0.1)
    losses, boxes, scores, labels, masks = inference.predictions(
        objective.inputs_from(photographs(2, 32))
    )
    assert losses.abs().sum() == 0
    count = scores.shape[1]
    assert (boxes.shape, labels.shape) == ((2, count, 4), (2, count))
    assert masks.shape == (2, count, 28, 28)
    assert objective.outputs((losses, boxes, scores, labels, masks)) is scores
    blank = objective.blank_sequence(2, torch.device("cpu"))
    trained = run_layers([each.train() for each in inference.layers.modules], blank.inputs)
    assert trained.requires_grad


def test_accuracy_is_the_share_of_objects_that_as_many_detections_find(build_paper):
    objective, _ = build_paper(config())
    batch = squares([[(0, 0, 10, 10), (10, 10, 30, 30)], [(0, 0, 8, 8)]], [[1, 2], [3]])
    targets = objective.sequence(batch).targets
    right, wrong = [10.0, 10, 30, 30], [0.0, 0, 10, 4]
    boxes = torch.tensor([[right, wrong, [0.0, 0, 10, 10]], [[0.0, 0, 8, 8]] * 3])
    labels = torch.tensor([[2, 1, 1], [2, 3, 3]])
    scores = torch.tensor([[0.9, 0.8, 0.7], [0.9, 0.8, 0.0]])
    predictions = (torch.zeros(2, NUM_LOSSES), boxes, scores, labels, None)
    # One of two: the third box is right, but only two count. Of the other image the class is wrong.
    assert objective.measures(predictions, targets)["accuracy"] == (1, 3)
    nothing = objective.sequence(squares([[], []], [[], []])).targets
    assert objective.measures(predictions, nothing)["accuracy"] == (0, 0)


REFUSED = [
    (
        {"window": 3, "global_blocks": [2]},
        (),
        "finetune.window: 3 does not divide the image's 8 patches along a side",
    ),
    ({"window": 8, "global_blocks": [2]}, (), "finetune.window: 8 covers the image's whole side"),
    ({"window": 4}, (), "finetune.window: 4 limits no block, since all 2 attend to all patches"),
    ({"window": 4, "global_blocks": [3]}, (), "finetune.global_blocks: [3] must be different"),
    ({"global_blocks": [1]}, (), "finetune.global_blocks: applies only to finetune.window"),
    ({"layers": [1, 1, 2, 2]}, (), "finetune.layers: applies only to finetune.task segments"),
    ({"mixup": 0.8}, (), "finetune.mixup: applies only to finetune.task classes"),
    ({}, ("data.crop=random_resized",), "data.crop: random_resized must be jittered for"),
    ({}, ("data.image_size=24",), "data.image_size: must be a multiple of 16"),
    ({}, ("objective.patch_size=2",), "instances needs patches of 4, 8, 16 or 32 pixels, not 2"),
    ({}, ("model.hidden_size=18",), "model.hidden_size: 18 must be a multiple of 4"),
    *(
        ({}, (f"parallel.{key}=2",), f"parallel.{key}: must be 1 for finetune.task instances")
        for key in (
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "tensor_model_parallel_size",
        )
    ),
]


@pytest.mark.parametrize(("keys", "words", "message"), REFUSED)
def test_what_does_not_fit_is_refused(build_paper, keys, words, message):
    with pytest.raises(UserError) as refused:
        build_paper(config(**keys), *words)
    assert message in str(refused.value)


def test_models_without_patches_or_full_attention_are_refused(build_paper):
    with pytest.raises(UserError, match=r"finetune.visibility: is kept, and blocks of darl"):
        build_paper(config(CAUSAL))
    build_paper(config(CAUSAL, visibility="full"))
    with pytest.raises(UserError, match="instances reads patches of an image"):
        build_paper(config("{name: igpt, vocabulary_size: 12}"))
    with pytest.raises(UserError, match=r"window: applies only to finetune.task instances"):
        build_paper(config().replace("task: instances", "task: segments\n  window: 4"))


def test_a_missing_extra_is_named(build_paper, monkeypatch):
    found = util.find_spec
    monkeypatch.setattr(
        util, "find_spec", lambda name, *rest: None if name == "torchvision" else found(name, *rest)
    )
    with pytest.raises(UserError, match=r"finetune.task: instances needs torchvision: pip install"):
        build_paper(config())


def test_torchvision_is_imported_for_detection_alone():
    """Only one module imports it at once, and no module imports that one at once."""
    folder, extras = Path(megavis.__file__).parents[1], {"torchvision", "pycocotools"}
    own = folder / "megavis/model/detection.py"
    for path in [*folder.glob("megavis/**/*.py"), *folder.glob("data_tools/**/*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [
            each.names[0].name if isinstance(each, ast.Import) else each.module or ""
            for each in tree.body
            if isinstance(each, ast.Import | ast.ImportFrom)
        ]
        assert "megavis.model.detection" not in names, path
        if path != own:
            assert not extras & {name.partition(".")[0] for name in names}, path
