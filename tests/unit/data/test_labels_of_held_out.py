"""Labels of a held-out data set that do not fit the training set: what to do is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.data.loading.labels import check_classes, check_first_images, check_labels
from megavis.training.pretraining import Pretraining

pytestmark = pytest.mark.once

TRAIN = ("bird", "cat", "dog")


def issue(classes, labels, num_classes=3):
    where, key = Path("shards/val"), "data.validation"
    try:
        check_labels(key, SimpleNamespace(directory=where, labels=np.array(labels)))
        check_classes(key, where, classes, num_classes, TRAIN)
    except UserError as error:
        return [text for _, text in error.issues]
    return []


@pytest.mark.parametrize(
    ("classes", "labels", "message"),
    [
        (
            ("bird", "dog"),
            [0, 1],
            "has 2 classes; finetune.num_classes is 3; it lacks 'cat' of data.train: write its"
            " shards with --classes-from, the folder of data.train",
        ),
        (("bird",), [0], "it lacks 'cat' and 1 more of data.train"),
        (("bird", "cat", "dog", "eel"), [0, 3], "data.train has no class 'eel'"),
        (("bird", "cat", "eel"), [0, 2], "data.train has no class 'eel'"),
        (("dog", "cat", "bird"), [0, 2], "write its shards with --classes-from"),
    ],
)
def test_what_to_do_is_said(classes, labels, message):
    (text,) = issue(classes, labels)
    assert message in text
    assert "shards/val" in text


def test_a_class_without_an_image_is_no_fault():
    assert issue(TRAIN, [0, 1]) == []


class Labelled(list):
    directory = Path("shards/train")

    @property
    def labels(self):
        return np.array(self)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "shares", [[1] * 1000, [1] * 2, [99, 1], [1 / rank for rank in range(1, 2001)]]
)
def test_first_images_in_random_order_are_accepted(shares, seed):
    random = np.random.default_rng(seed)
    labels = random.choice(len(shares), 20_000, p=np.array(shares) / sum(shares))
    labels[random.random(len(labels)) < 0.3] = -1
    for limit in (50, 5000, None):
        check_first_images(Labelled(labels), limit)


@pytest.mark.parametrize("num_classes", [2, 10, 1000])
def test_first_images_of_a_sorted_folder_are_refused(num_classes):
    labels = np.arange(20_000) // (20_000 // num_classes)
    few = Labelled(labels)
    found = -(-5000 // (20_000 // num_classes))
    count = "1 class" if found == 1 else f"{found} classes"
    with pytest.raises(UserError, match=f"its first 5,000 images have {count}, all 20,000 have"):
        check_first_images(few, 5000)
    check_first_images(few, 20_000)
    check_first_images(few, 19_000)


def test_pretraining_is_not_validated_on_a_few_classes():
    objective = SimpleNamespace(pretrained_key=None, measures_accuracy=False)
    validation = Labelled(np.arange(1000) // 100)

    def open_with(**keys):
        training = SimpleNamespace(
            **{"patience": 0, "validate_every": 10, "validation_images": 256, **keys}
        )
        return Pretraining.open(SimpleNamespace(training=training), objective, validation)

    with pytest.raises(UserError, match="training.validation_images: .* 3 classes, all 1,000 have"):
        open_with()
    assert open_with(validation_images=900).validation is validation
    assert open_with(validate_every=0).validation is validation
