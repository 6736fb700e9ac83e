"""Labels of a held-out data set that do not fit the training set: what to do is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megavis.config.errors import UserError
from megavis.data.loading.labels import check_count, check_labels, check_numbering

pytestmark = pytest.mark.once

TRAIN = ("bird", "cat", "dog")


def issue(classes, labels):
    where, key = Path("shards/val"), "data.validation"
    try:
        check_labels(key, SimpleNamespace(directory=where, labels=np.array(labels)))
        check_numbering(where, classes, TRAIN, key=key)
    except UserError as error:
        return error.issues
    return []


@pytest.mark.parametrize(
    ("classes", "labels", "message"),
    [
        (
            ("bird", "dog"),
            [0, 1],
            "numbers its classes differently from data.train; it lacks 'cat' of data.train: write"
            " its shards with --classes-from, the folder of data.train",
        ),
        (("bird",), [0], "it lacks 'cat' and 1 more of data.train"),
        (("bird", "cat", "dog", "eel"), [0, 3], "data.train has no class 'eel'"),
        (("bird", "cat", "eel"), [0, 2], "data.train has no class 'eel'"),
        (("dog", "cat", "bird"), [0, 2], "write its shards with --classes-from"),
    ],
)
def test_what_to_do_is_said(classes, labels, message):
    ((key, text),) = issue(classes, labels)
    assert key == "data.validation"
    assert message in text
    assert "shards/val" in text


def test_a_class_without_an_image_is_no_fault():
    assert issue(TRAIN, [0, 1]) == []


def test_another_number_of_classes_than_the_network_has():
    check_count("data.train", Path("shards/train"), TRAIN, 3)
    with pytest.raises(UserError, match=r"has 3 classes; finetune.num_classes is 4"):
        check_count("data.train", Path("shards/train"), TRAIN, 4)


def test_the_last_classes_may_be_missing_if_that_is_allowed():
    check_numbering(Path("shards/val"), TRAIN[:2], TRAIN, may_lack_last=True)
    with pytest.raises(UserError, match="it lacks 'dog' of data.train"):
        check_numbering(Path("shards/val"), TRAIN[:2], TRAIN)
    with pytest.raises(UserError, match="it lacks 'cat' of data.train"):
        check_numbering(Path("shards/val"), ("bird", "dog"), TRAIN, may_lack_last=True)
