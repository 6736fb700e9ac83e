"""The VAE of label maps in several layouts; stages exchange noise, moments and their gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from label_map_config import write_label_map_config
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from scene_shards import write_scene_shards

from megavis.training.parity import train_briefly

STEPS = 6
LAYOUTS: list[Any] = [
    pytest.param(2, {"zero_stage": 3}, marks=pytest.mark.once, id="zero3"),
    pytest.param(
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 0},
        id="tp2-sp",
    ),
    pytest.param(3, {"pipeline_model_parallel_size": 3}, id="pp3"),
    pytest.param(
        4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, id="tp2-pp2"
    ),
]


@pytest.fixture(scope="module")
def reference(run_job: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The config, and its curve on one process."""
    folder = write_scene_shards(tmp_path_factory.mktemp("scenes"), images=24)
    path = write_label_map_config(folder, "panoptic")
    curve = run_job(train_briefly, 1, make_config(path), STEPS)[0]
    assert curve[-1][0] < curve[0][0], "the loss does not fall"
    return path, curve


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS)
def test_layouts_match_one_process(
    run_job: Callable[..., Any], reference: Any, processes: int, layout: dict[str, Any]
) -> None:
    path, curve = reference
    config = with_layout(make_config(path), **layout)
    curves = run_job(train_briefly, processes, config, STEPS)
    assert largest_difference(curves, curve) <= TOLERANCE
