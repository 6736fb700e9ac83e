"""Average precision against plain loops, and detections in the size of the original."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
import torch
from made_results import made
from pycocotools import mask as coco

from megavis.evaluation import detection
from megavis.evaluation.detection import Found, _in_original, accuracy_of
from megavis.evaluation.results import FinetuneResult
from megavis.reports.results import KNOWN_RESULTS
from megavis.reports.run_record import metrics_of

pytestmark = pytest.mark.once

SIZE = (120, 160)
NAMES = ("ball", "box", "cone")
THRESHOLDS = [0.5 + 0.05 * step for step in range(10)]


def encoded(mask):
    return coco.encode(np.asfortranarray(mask))["counts"].decode()


def ellipse(box):
    left, top, width, height = box
    rows, columns = np.indices(SIZE) + 0.5
    inside = ((columns - left) / width - 0.5) ** 2 + ((rows - top) / height - 0.5) ** 2 < 0.25
    return inside.astype(np.uint8)


def scenes(seed=0, count=12):
    """Return annotations of ellipses, and detections near them, some of another class."""
    random = np.random.default_rng(seed)
    images = []
    for number in range(count):
        objects, boxes, classes = [], [], []
        for _ in range(random.integers(0, 5)):
            box = [*random.uniform(0, 60, 2), *random.uniform(12, 58, 2)]
            label, crowd = int(random.integers(1, 4)), int(random.random() < 0.15)
            mask = ellipse(box)
            objects.append(
                {"class": label, "box": box, "area": float(mask.sum()), "crowd": crowd}
                | {"mask": encoded(mask), "pixels": mask}
            )
            for _ in range(random.integers(1, 4)):
                boxes.append((np.array(box) + random.normal(0, 3, 4)).clip(1))
                classes.append(label if random.random() < 0.8 else 1 + label % 3)
        order = random.permutation(len(boxes))
        boxes = [boxes[place] for place in order]
        scores = np.sort(random.random(len(boxes)))[::-1]
        found = Found(
            np.array(boxes).reshape(-1, 4),
            scores.copy(),
            np.array([classes[place] for place in order], np.int64),
            tuple(encoded(ellipse(box)) for box in boxes),
        )
        images.append((number, {"size": list(SIZE), "objects": objects}, found))
    return images


def overlap(kind, one, other, other_is_crowd):
    """Return the IoU of two boxes or masks; of a crowd, the share of the first inside it."""
    if kind == "mask":
        both, first, second = (one & other).sum(), one.sum(), other.sum()
    else:
        sides = [
            min(one[axis] + one[axis + 2], other[axis] + other[axis + 2])
            - max(one[axis], other[axis])
            for axis in (0, 1)
        ]
        both = max(0.0, sides[0]) * max(0.0, sides[1])
        first, second = one[2] * one[3], other[2] * other[3]
    return both / (first if other_is_crowd else first + second - both)


def precision_of(images, kind, label, threshold):
    """Return average precision and recall of a class at an IoU; None without objects."""
    hits, wanted = [], 0
    for _, annotation, found in images:
        own = [each for each in annotation["objects"] if each["class"] == label]
        own.sort(key=lambda each: each["crowd"])
        wanted += sum(not each["crowd"] for each in own)
        taken = set()
        for place in np.flatnonzero(found.classes == label):
            guess = found.boxes[place] if kind == "box" else ellipse(found.boxes[place])
            best, chosen = min(threshold, 1 - 1e-10), None
            for number, each in enumerate(own):
                if number in taken and not each["crowd"]:
                    continue
                # A crowd never takes a detection from an object.
                if chosen is not None and not own[chosen]["crowd"] and each["crowd"]:
                    break
                shape = each["box"] if kind == "box" else each["pixels"]
                share = overlap(kind, guess, shape, each["crowd"])
                if share >= best:
                    best, chosen = share, number
            if chosen is None or not own[chosen]["crowd"]:
                hits.append((-found.scores[place], chosen is not None))
            taken.add(chosen)
    if not wanted:
        return None
    hits.sort(key=lambda each: each[0])
    right = np.cumsum([hit for _, hit in hits])
    recall, share = right / wanted, right / np.arange(1, len(hits) + 1)
    levels = [
        max((s for r, s in zip(recall, share, strict=True) if r >= level), default=0.0)
        for level in np.linspace(0, 1, 101)
    ]
    return statistics.fmean(levels), (recall[-1] if len(hits) else 0.0)


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_numbers_equal_plain_loops(kind):
    images = scenes()
    assert sum(each["crowd"] for _, note, _ in images for each in note["objects"]) > 1
    found = getattr(accuracy_of(images, 4), kind)
    table = {
        (label, step): precision_of(images, kind, label, threshold)
        for label in (1, 2, 3)
        for step, threshold in enumerate(THRESHOLDS)
    }
    mean = statistics.fmean
    assert found.ap == pytest.approx(mean(each[0] for each in table.values()))
    assert found.ap50 == pytest.approx(mean(table[label, 0][0] for label in (1, 2, 3)))
    assert found.ap75 == pytest.approx(mean(table[label, 5][0] for label in (1, 2, 3)))
    assert found.ar100 == pytest.approx(mean(each[1] for each in table.values()))
    by_class = [mean(table[label, step][0] for step in range(10)) for label in (1, 2, 3)]
    assert found.by_class == (*map(pytest.approx, by_class), None)
    assert 0.1 < found.ap < 0.9


def test_without_detections_or_objects():
    images = scenes()
    nothing = Found(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64), ())
    silent = accuracy_of([(number, note, nothing) for number, note, _ in images], 3)
    assert (silent.box.ap, silent.mask.ar100) == (0.0, 0.0)
    empty = [(number, {**note, "objects": []}, found) for number, note, found in images]
    assert dataclasses.asdict(accuracy_of(empty, 3).box)["ap"] is None


def test_result_of_fine_tuning_is_read_back_and_shown(tmp_path):
    found = accuracy_of(scenes(), 4)
    names = ("ball", "box", "cone", "cup")
    result = dataclasses.replace(made("finetune_test.json"), accuracy=found, class_names=names)
    path = tmp_path / "finetune_test.json"
    result.write(path)
    assert FinetuneResult.read(path) == result
    shown = {each.name: each.value for each in metrics_of({path.name: result})}
    assert shown == {"box AP": 100 * found.box.ap, "mask AP": 100 * found.mask.ap}
    whole, classes = KNOWN_RESULTS["finetune_test"](None, result)
    assert whole.rows[0] == ("AP", f"{100 * found.box.ap:.1f} %", f"{100 * found.mask.ap:.1f} %")
    assert len(whole.rows) == 12
    assert [row[0] for row in classes.rows] == list(names)
    assert classes.rows[3] == ("cup", "–", "–")


def test_detections_return_to_the_original():
    """An image of 40 by 100 pixels is 26 by 64 of a square of 64, its scale 0.64 or 0.65."""
    boxes = torch.tensor([[16.0, 6.5, 48, 19.5], [0, 30.0, 64, 60], [0, 0, 0, 0]])
    masks = torch.ones(3, 28, 28)
    found = _in_original(
        (40, 100), 64, boxes, torch.tensor([0.9, 0.8, 0.0]), torch.tensor([2, 1, 0]), masks
    )
    # The second lies in the padding, the third fills the batch.
    assert found.classes.tolist() == [2]
    assert found.boxes[0].tolist() == pytest.approx([25.0, 10.0, 50.0, 20.0])
    mask = coco.decode({"size": [40, 100], "counts": found.masks[0]})
    rows, columns = np.nonzero(mask)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 29, 25, 74)


def test_as_many_of_the_best_detections_are_drawn_as_there_are_objects(monkeypatch):
    random = np.random.default_rng(0)
    images = [each[1:] for each in scenes() if len(each[1]["objects"]) < len(each[2].scores)][:3]
    monkeypatch.setattr(
        detection, "_payload", lambda dataset, place: (place, json.dumps(dataset[place]).encode())
    )
    monkeypatch.setattr(
        detection, "decode_rgb", lambda _: random.integers(0, 255, (*SIZE, 3), dtype=np.uint8)
    )
    monkeypatch.setattr(detection, "detect", lambda *_: [found for _, found in images])
    annotations = [
        {**each, "objects": [without_pixels(one) for one in each["objects"]]} for each, _ in images
    ]
    figure = detection.plot_examples(None, None, annotations, NAMES, title="t")
    for row, (annotation, found) in enumerate(images):
        names = [NAMES[each["class"] - 1] for each in annotation["objects"]]
        assert [text.get_text() for text in figure.axes[2 * row].texts] == names
        best = [
            f"{NAMES[label - 1]} {score:.0%}"
            for label, score in zip(found.classes, found.scores, strict=True)
        ]
        drawn = figure.axes[2 * row + 1]
        assert [text.get_text() for text in drawn.texts] == best[: len(names)]
        assert len(drawn.patches) == len(names)


def without_pixels(annotated):
    return {key: value for key, value in annotated.items() if key != "pixels"}
