"""ZeRO 2 and 3 with pipeline stages: what a process holds, of gradients and of weights."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gather_jobs import Gathers, gathers_of_a_step
from memory_jobs import live_storages, measure_shape, pipeline_memory, read

from megavis.planning.layouts import Layout
from megavis.planning.shape import ModelShape
from megavis.planning.states import states_of

pytestmark = pytest.mark.once

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
PRESET = str(CONFIGS / "igpt" / "demo.yaml")
# Four micro-batches on two stages, so that forward and backward passes alternate.
WORDS = [
    "model.num_layers=6",
    "model.hidden_size=256",
    "training.batch_size=8",
    "training.micro_batch_size=1",
    "parallel.pipeline_model_parallel_size=2",
]
MICRO_BATCHES = 4
ZERO_3 = [*WORDS, "parallel.zero_stage=3"]
BLOCK = 12 * 256**2
FULL = "parallel.activation_checkpointing=full"


@pytest.fixture(scope="module")
def shape(run_job: Any) -> ModelShape:
    return run_job(measure_shape, 1, PRESET, WORDS)[0]


def test_meta_tensors_are_not_counted_as_held() -> None:
    before = live_storages()
    tensors = [torch.empty(1000, device=device) for device in ("meta", "cpu")]
    assert live_storages(before) == tensors[1].nbytes


@pytest.mark.parametrize("zero", [2, 3])
def test_processes_hold_their_share_only(run_job: Any, shape: ModelShape, zero: int) -> None:
    words = [*WORDS, f"parallel.zero_stage={zero}"]
    layout = Layout.of(read(PRESET, words), 4)
    found = run_job(pipeline_memory, 4, PRESET, words)
    for rank, held in enumerate(found):
        whole, states = (
            states_of(shape.layers, each, rank // 2, precision="float32", keeps_average=False)
            for each in (replace(layout, data=1), layout)
        )
        assert states.gradients == whole.gradients / 2
        assert held == pytest.approx(states.total - states.gathered, rel=0.1)
        if zero == 3:
            assert states.weights == whole.weights / 2


# Config, overrides, and how often a block that is not the first of a pass is gathered for a
# micro-batch: once in each pass. With inputs besides hidden states, recomputed blocks release
# their weights, and four modules gather their own again.
# And weights that DeepSpeed keeps until a backward pass ends: a matrix of DARL's head whose inputs
# need no gradients.
CASES: list[Any] = [
    ("igpt", [], 2, 0),
    ("igpt", [FULL, "parallel.hierarchical_partition_size=2"], 2, 0),
    ("darl", ["objective.two_streams=true"], 2, 64 * 256),
    ("darl", ["objective.two_streams=true", FULL], 6, 64 * 256),
]


@pytest.mark.parametrize(("paper", "words", "times", "kept"), CASES)
def test_next_weights_are_gathered_while_a_layer_computes(
    run_job: Any, paper: str, words: list[str], times: int, kept: int
) -> None:
    path = str(CONFIGS / paper / "demo.yaml")
    for found in run_job(gathers_of_a_step, 4, path, [*ZERO_3, *words]):
        last = len(found.sizes) - 1
        kinds = Counter(event.kind for event in found.events)
        assert kinds["forward"] == kinds["backward"] == MICRO_BATCHES * (last + 1)
        for event in found.events:
            ends = {"forward": last, "backward": 0}
            if event.kind == "gather" or event.layer == ends[event.kind]:
                continue
            following = event.layer + (1 if event.kind == "forward" else -1)
            # Launched, and not waited for. DARL's head is larger than a block.
            whole = {"INFLIGHT"} if found.sizes[following] <= BLOCK else set()
            assert event.states == whole or "INFLIGHT" in event.states
        gathers = Counter(event.layer for event in found.events if event.kind == "gather")
        assert found.sizes[1] == BLOCK
        assert gathers[1] == MICRO_BATCHES * times
        _check_bound(found, bucket=BLOCK, kept=kept)


@pytest.mark.parametrize("bucket", [1, BLOCK // 3])
def test_no_more_is_gathered_ahead_than_the_bucket(run_job: Any, bucket: int) -> None:
    """The last parameter may exceed it, as in DeepSpeed's own gathering ahead."""
    for found in run_job(gathers_of_a_step, 4, PRESET, ZERO_3, bucket):
        _check_bound(found, bucket=bucket)


def _check_bound(found: Gathers, *, bucket: int, kept: int = 0) -> None:
    """While a layer computes, it and a part of the next one are gathered."""
    for event in found.events:
        if event.kind != "gather":
            following = event.layer + (1 if event.kind == "forward" else -1)
            ahead = 0
            if 0 <= following < len(found.sizes):
                for size in found.parameters[following]:
                    ahead += size * (ahead < bucket)
            assert event.live <= found.sizes[event.layer] + ahead + kept
