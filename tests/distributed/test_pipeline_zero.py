"""ZeRO 2 and 3 with pipeline stages: what a process holds, of gradients and of weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_jobs import measure_shape, pipeline_memory, read

from megavis.planning.layouts import Layout
from megavis.planning.shape import ModelShape
from megavis.planning.states import states_of

pytestmark = pytest.mark.once

PRESET = Path(__file__).parents[2] / "yaml_configs" / "igpt" / "demo.yaml"
# Eight micro-batches on two stages, so that forward and backward passes alternate.
WORDS = [
    "model.num_layers=6",
    "model.hidden_size=256",
    "training.batch_size=16",
    "training.micro_batch_size=1",
    "parallel.pipeline_model_parallel_size=2",
]


@pytest.fixture(scope="module")
def shape(run_job: Any) -> ModelShape:
    return run_job(measure_shape, 1, str(PRESET), WORDS)[0]


@pytest.mark.parametrize("zero", [2, 3])
def test_processes_hold_their_share_only(run_job: Any, shape: ModelShape, zero: int) -> None:
    words = [*WORDS, f"parallel.zero_stage={zero}"]
    layout = Layout.of(read(str(PRESET), words), 4)
    largest = shape.layers.largest(1)
    found = run_job(pipeline_memory, 4, str(PRESET), words)
    for rank, (held, weights) in enumerate(found):
        whole, states = (
            states_of(shape.layers, each, rank // 2, precision="float32", keeps_average=False)
            for each in (replace(layout, data=1), layout)
        )
        assert states.gradients == whole.gradients / 2
        assert held == pytest.approx(states.total - states.gathered, rel=0.1)
        if zero == 3:
            assert states.weights == whole.weights / 2
            # One layer at a time, besides the gains of norms.
            assert largest <= weights < 1.1 * largest
