"""Every JSON that a run writes can be read by any parser, whatever its numbers are."""

import errno
import json
import math
import os

import pytest

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.data.format.files import from_json, to_json, write_json
from megavis.training.metrics import (
    MetricsWriter,
    drop_steps_after,
    read_json_lines,
    read_metrics,
)

pytestmark = pytest.mark.once


def strict(text):
    """Parse as the standard has it, without Python's NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"loss": math.nan}, '{"loss": null, "not_finite": {"loss": "nan"}}'),
        ({"a": -math.inf, "b": 1}, '{"a": null, "b": 1, "not_finite": {"a": "-inf"}}'),
        ({"a.b": [1.5, math.inf]}, '{"a.b": [1.5, null], "not_finite": {"a.b.1": "inf"}}'),
        ({"a": {"b": math.inf}}, '{"a": {"b": null, "not_finite": {"b": "inf"}}}'),
        ([{"a": math.nan}, None], '[{"a": null, "not_finite": {"a": "nan"}}, null]'),
        ({"a": [[0, math.nan]]}, '{"a": [[0, null]], "not_finite": {"a.0.1": "nan"}}'),
        ({"step": 1, "a": None, "b": True, "c": "NaN"}, None),
    ],
)
def test_what_is_not_finite_is_null_and_named(value, text):
    written = to_json(value)
    assert written == (text or json.dumps(value))
    strict(written)
    assert repr(from_json(written)) == repr(value)


def test_files_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n')
    first, second = read_json_lines(path)
    assert math.isnan(first["loss"])
    assert second == {"step": 2, "loss": math.inf}


def test_metrics_are_amended(tmp_path):
    writer = MetricsWriter(tmp_path, first_step=0, logging=())
    writer.write(1, {"loss": math.nan})
    writer.amend(1, {"validation_loss": math.inf})
    writer.close()
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert strict(line)["not_finite"] == {"loss": "nan", "validation_loss": "inf"}
    [record] = read_metrics(tmp_path)
    assert record.keys() == {"step", "loss", "validation_loss"}
    assert math.isnan(record["loss"])


def test_results_are_json(tmp_path):
    write_json(tmp_path / "probe.json", {"accuracy": math.nan})
    strict((tmp_path / "probe.json").read_text())


def test_files_of_a_run_that_diverges_are_json(tiny_config, tmp_path, capsys):
    words = ["optimizer.learning_rate=1e6", "optimizer.gradient_clipping=0", "training.steps=3"]
    words += ["schedule.warmup_steps=0", "training.validate_every=1", f"output={tmp_path}"]
    main(["train", str(tiny_config), "--device", "cpu", *words])
    records = read_metrics(tmp_path / "tiny")
    assert not all(math.isfinite(number) for record in records for number in record.values())
    for path in tmp_path.rglob("*.json*"):
        text = path.read_text()
        for each in text.splitlines() if path.suffix == ".jsonl" else [text]:
            strict(each)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    strict(capsys.readouterr().out)
    assert main(["report", str(tmp_path / "tiny")]) == 0


def test_a_start_drops_an_incomplete_last_line_and_names_any_other(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", [to_json({"step": step}) for step in (1, 2, 3)]
    path.write_text("\n".join([*lines, '{"step": 4, "lo']))
    drop_steps_after(path, 2)
    assert path.read_text() == "\n".join([*lines[:2], ""])
    for wrong in ('{"step": 2, "lo', '{"loss": 1.0}', "7"):
        path.write_text("\n".join([lines[0], wrong, lines[2], ""]))
        before = path.read_bytes()
        with pytest.raises(UserError, match="metrics.jsonl, line 2: no JSON object with a step"):
            drop_steps_after(path, 9)
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage", [b"\0" * 4096, b'{"step": 3, "lo\0\0\0\xff1.0}\n{"loss": 1.0}\n', b"7\n[]\n"]
)
def test_a_start_drops_what_a_lost_node_left_after_its_checkpoint(tmp_path, damage):
    """Otherwise the run could not resume, for lines that it writes again."""
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "loss": 1.0}}\n'.encode() for step in (1, 2, 3, 4)]
    path.write_bytes(b"".join([*lines[:3], damage, lines[3]]))
    drop_steps_after(path, 2)
    assert path.read_bytes() == b"".join(lines[:2])


@pytest.mark.parametrize("steps", [2, 4])
def test_a_start_needs_no_room_for_another_copy_of_the_metrics(tmp_path, steps, monkeypatch):
    """A run could otherwise not resume on an almost full disk, though it has written every line."""
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "loss": 1.0}}\n'.encode() for step in range(1, steps + 1)]
    path.write_bytes(b"".join(lines))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    drop_steps_after(path, 2)
    assert path.read_bytes() == b"".join(lines[:2])
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
