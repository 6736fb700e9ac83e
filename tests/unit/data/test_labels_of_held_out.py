"""Labels of a held-out data set that do not fit the training set: what to do is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.data.loading.labels import check_classes, check_labels

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
