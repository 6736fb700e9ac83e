"""Resuming in the midst of an order that becomes raster order."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from megavis.cli import main

OBJECTIVE = (
    "{name: compose, reads: {kind: colors, vocabulary_size: 32},"
    " schedule: {kind: one_by_one, anneal: [0.25, 1]}, asks: {kind: shift, place: both},"
    " density: {kind: categorical}}"
)


@pytest.fixture
def train(small_config, tmp_path):
    def train(name, *more):
        words = [f"objective={OBJECTIVE}", f"name={name}", f"output={tmp_path}", "training.steps=6"]
        words += ["training.log_every=1", "checkpoint.every=2", "checkpoint.keep_last=9", *more]
        assert main(["train", str(small_config), "--device", "cpu", *words]) == 0
        return tmp_path / name

    return train


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_resumed_run_draws_the_orders_of_its_steps(train, tmp_path):
    whole = train("whole")
    expected = losses(whole)
    shutil.copytree(whole, tmp_path / "resumed")
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"resumed/checkpoints/step-0000000{step}")
    resumed = train("resumed")
    assert losses(resumed) == expected
    saved = "checkpoints/step-00000006/rank-00000.safetensors"
    found, weights = (load_file(run / saved) for run in (resumed, whole))
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)
    # Orders matter: those of another share give other losses.
    assert losses(train("raster", "objective.schedule.anneal=[0, 0]")) != expected
