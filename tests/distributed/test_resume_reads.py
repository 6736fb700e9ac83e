"""A process that resumes reads what it keeps, not what others keep."""

import pytest
from resume_jobs import resume_costs
from run_jobs import train_run

SIZES = ["model.hidden_size=128", "model.num_layers=2"]
LAYOUTS = {
    "dp2-zero0": (2, ["parallel.zero_stage=0"]),
    "dp4-zero1": (4, ["parallel.zero_stage=1"]),
    "dp3-zero2": (3, ["parallel.zero_stage=2", "training.batch_size=12"]),
    "dp4-zero3": (4, ["parallel.zero_stage=3"]),
    "dp4-zero1-bf16": (4, ["parallel.zero_stage=1", "training.precision=bf16"]),
    "tp2-dp2-zero1": (4, ["parallel.zero_stage=1", "parallel.tensor_model_parallel_size=2"]),
    "tp2-dp2-zero3": (4, ["parallel.zero_stage=3", "parallel.tensor_model_parallel_size=2"]),
    "pp2-dp2-zero3": (4, ["parallel.zero_stage=3", "parallel.pipeline_model_parallel_size=2"]),
    "cp2-dp2-zero1": (4, ["parallel.zero_stage=1", "parallel.context_parallel_size=2"]),
}


@pytest.fixture(scope="module")
def saved(run_job, tiny_config, tmp_path_factory):
    output = tmp_path_factory.mktemp("saved")
    words = [
        *SIZES,
        "training.steps=1",
        "schedule.warmup_steps=0",
        f"output={output}",
        "name=saved",
    ]
    run_job(train_run, 1, str(tiny_config), words)
    return output / "saved"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_process_reads_what_it_keeps(run_job, tiny_config, saved, layout):
    processes, words = LAYOUTS[layout]
    words = [*SIZES, *words, "training.micro_batch_size=null"]
    for costs in run_job(resume_costs, processes, str(tiny_config), words, str(saved)):
        assert costs.read == pytest.approx(costs.kept, rel=0.1)
