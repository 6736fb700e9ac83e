"""`benchmarks.compare_trees` reports every difference between two records."""

import copy

import numpy as np
import pytest

from benchmarks.compare_trees.records import read, write
from benchmarks.compare_trees.report import (
    Allowed,
    Difference,
    differences,
    lines_of,
    ratios,
    read_allowed,
)

RECORD = {
    "curve": [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}],
    "parameters": {"head.weight": {"shape": [2, 3], "weight_decay": 0.1}, "head.bias": {}},
    "says": [2, "", "error: no such file\nat all"],
    "resolved": "name: a\nseed: 0\n",
    "json": '{"parts": {"head": 6}}',
    "features": np.array([[0.5, np.nan], [-0.0, 3.0]], np.float32),
    "png": np.array([[1, 2]], np.uint8),
    "mask": np.array([True, False]),
    "seconds/step": 2.0,
}


def changed(name, change):
    """Return a copy of the record with one measurement changed."""
    record = copy.deepcopy(RECORD)
    record[name] = change(record[name])
    return record


def set_in(place, value):
    def change(array):
        array[place] = value
        return array

    return change


def test_equal_records_have_no_differences():
    assert differences("igpt", RECORD, copy.deepcopy(RECORD)) == []


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "features",
            set_in((1, 1), np.nextafter(np.float32(3), np.float32(4))),
            "1 of 4 numbers, by at most 2.38e-07 (7.9e-08 of the largest); first at [1, 1]",
        ),
        ("features", set_in((1, 0), 0.0), "1 of 4 numbers, by at most 0 "),
        ("features", set_in((0, 1), 0.0), "1 of 4 numbers"),
        ("features", lambda a: a.astype(np.float64), "float32 [2, 2] became float64 [2, 2]"),
        ("png", lambda a: a.T, "uint8 [1, 2] became uint8 [2, 1]"),
        ("png", set_in((0, 1), 5), "by at most 3 (1.5e+00 of the largest); first at [0, 1]: 2 bec"),
        ("mask", set_in(1, True), "1 of 2 numbers, by at most 1"),
        (
            "curve",
            lambda c: [c[0], {"step": 2, "loss": 0.2000001}],
            "[1].loss: 0.2 became 0.2000001 (5.0e-07 of it)",
        ),
        ("curve", lambda c: c[:1], "became"),
        (
            "parameters",
            lambda p: {**p, "head.bias": {"weight_decay": 0.0}},
            "head.bias.weight_decay is in the new tree alone",
        ),
        ("parameters", lambda p: dict(reversed(p.items())), "keys: another order"),
        ("says", lambda s: [*s[:2], "error: no such file\nhere"], "line 2: 'at all' became 'here'"),
        ("says", lambda s: [0, *s[1:]], "[0]: 2 became 0"),
        ("resolved", lambda t: t + "x: 1\n", "line 3: '(its end)' became 'x: 1'"),
        ("resolved", lambda t: t.rstrip(), "another line end"),
        ("json", lambda t: t.replace("6", "7"), "parts.head: 6 became 7"),
        ("json", lambda t: np.zeros(1), "str became ndarray"),
    ],
)
def test_injected_difference_is_reported(name, change, text):
    (found,) = differences("igpt", RECORD, changed(name, change))
    assert found.name == f"igpt/{name}"
    assert text in found.text


def test_measurement_missing_from_one_tree_is_reported():
    less = {name: value for name, value in RECORD.items() if name != "mask"}
    assert differences("igpt", RECORD, less)[0].text == "is measured in the old tree alone"
    assert differences("igpt", less, RECORD)[0].text == "is measured in the new tree alone"


def test_seconds_are_compared_as_ratios():
    slower = changed("seconds/step", lambda seconds: 3 * seconds)
    assert differences("igpt", RECORD, slower) == []
    assert ratios(RECORD, slower) == {"step": 3.0}


def test_record_round_trips(tmp_path):
    write(tmp_path / "igpt-fresh", RECORD)
    assert differences("igpt", RECORD, read(tmp_path / "igpt-fresh")) == []


def test_allowed_differences_need_a_reason(tmp_path):
    path = tmp_path / "allowed.txt"
    path.write_text("# of this branch\n\nigpt/sample * # drawn one by one\n")
    allowed = read_allowed(path)
    assert allowed == [Allowed("igpt/sample *", "drawn one by one")]
    found = [Difference("igpt/sample --top-k 3", "x"), Difference("igpt/curve", "y")]
    lines, wrong = lines_of(found, allowed)
    assert wrong == 1
    assert lines == [
        "  allowed (drawn one by one)  igpt/sample --top-k 3: x",
        "  DIFFERS  igpt/curve: y",
    ]
    path.write_text("igpt/*\n")
    with pytest.raises(ValueError, match="has no reason"):
        read_allowed(path)
