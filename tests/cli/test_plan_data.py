"""`megavis plan` says what the training data need of a node, and refuses what cannot work."""

import json

import pytest

from megavis.cli import main

pytestmark = pytest.mark.once


def test_plan_counts_what_a_node_reads(shard_folders, small_config, tmp_path, capsys):
    folder = shard_folders / "train"
    stored = sum(file.stat().st_size for file in folder.glob("*.tar"))
    words = ["plan", str(small_config), "--gpus", "4", "--gpus-per-node", "2"]
    remote = [f"data.train=file://{folder}", f"data.cache={tmp_path}/cache"]
    assert main([*words, *remote, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    data, seconds = found["data"], found["asked"]["seconds_a_step"]
    # Two of four processes, each with its quarter of the eight images of a step.
    assert data["a_second"]["read"] == pytest.approx(4 / seconds * stored / 120)
    assert data["a_second"]["opened"] == data["a_second"]["fetched"] == 0
    assert data["index_bytes"] == (folder / "samples.index").stat().st_size
    assert data["cache_bytes"]["all"] == stored + data["index_bytes"]
    assert data["refused"] == []
    assert main([*words, *remote, "data.cache_gib=0.0001"]) == 2
    out = capsys.readouterr().out
    assert "  a node of tp1-pp1" in out
    assert "  CANNOT WORK: command line: data.cache_gib: 0.0001 GiB are too small" in out


def test_plan_without_the_data_says_so(small_config, tmp_path, capsys):
    missing = f"data.train={tmp_path}/elsewhere"
    assert main(["plan", str(small_config), missing, "--gpus", "1"]) == 0
    assert f"Data:\n  not counted: {tmp_path}/elsewhere" in capsys.readouterr().out
