"""Adafactor in all layouts: row and column means are reduced over the parts of a matrix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout

from megavis.training.adafactor import is_factored
from megavis.training.parity import train_briefly

WORDS = ("optimizer.algorithm=adafactor", "optimizer.weight_decay=0.1")
STEPS = 6
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"zero_stage": 1}),
    (2, {"zero_stage": 1}),
    (4, {"zero_stage": 2}),
    (2, {"zero_stage": 3}),
    (4, {"zero_stage": 2, "pipeline_model_parallel_size": 2}),
    (4, {"zero_stage": 3, "pipeline_model_parallel_size": 2}),
    (
        4,
        {
            "zero_stage": 1,
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    (2, {"zero_stage": 1, "offload_optimizer": "cpu"}),
    (2, {"zero_stage": 3, "offload_optimizer": "cpu"}),
    (2, {"zero_stage": 0, "tensor_model_parallel_size": 2}),
    (4, {"zero_stage": 3, "tensor_model_parallel_size": 2}),
]
# Tensor parallelism depends on the version of Megatron-Core.
ONCE = [layout for layout in LAYOUTS if "tensor_model_parallel_size" not in layout[1]]


@pytest.fixture(scope="module")
def reference(run_job: Any, tiny_config: Path) -> Any:
    config = with_layout(make_config(tiny_config, *WORDS), zero_stage=0)
    assert is_factored((config.model.hidden_size, config.model.hidden_size))
    return run_job(train_briefly, 1, config, STEPS)[0]


@pytest.mark.parametrize(
    ("processes", "layout"),
    [pytest.param(*each, marks=[pytest.mark.once] * (each in ONCE)) for each in LAYOUTS],
    ids=str,
)
def test_layouts_match_one_process(
    run_job: Callable[..., Any],
    reference: Any,
    tiny_config: Path,
    processes: int,
    layout: dict[str, Any],
) -> None:
    config = with_layout(make_config(tiny_config, *WORDS), **layout)
    curves = run_job(train_briefly, processes, config, STEPS)
    assert largest_difference(curves, reference) <= TOLERANCE
