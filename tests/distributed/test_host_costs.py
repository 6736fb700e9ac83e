"""A step neither waits for the device nor keeps measurements of earlier steps."""

import pytest
from step_jobs import HostCosts, host_costs

LAYOUTS = {
    "dp2-zero0": ["parallel.zero_stage=0"],
    "dp2-zero1": ["parallel.zero_stage=1"],
    "dp2-zero2": ["parallel.zero_stage=2"],
    "dp2-zero3": ["parallel.zero_stage=3"],
    "pp2-zero1": ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=1"],
    "pp2-zero3": ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=3"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_does_not_wait_or_grow(run_job, tiny_config, layout):
    """Two micro-batches a step; DeepSpeed's throughput timer starts at its third step."""
    words = [*LAYOUTS[layout], "training.micro_batch_size=2"]
    costs = run_job(host_costs, 2, str(tiny_config), words, 6)
    assert costs == [HostCosts(synchronizations=0, kept=0)] * 2
