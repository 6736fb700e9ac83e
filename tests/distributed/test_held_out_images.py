"""Validation counts each held-out image once, on any number of processes."""

from pathlib import Path
from typing import Any

import pytest
from run_jobs import deterministic_metrics, train_run

pytestmark = pytest.mark.once

# Neither is a multiple of the ranks; of 3 images, one of 4 ranks has none of its own.
COUNTS = [41, 3]


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("count", COUNTS)
def test_validation_does_not_depend_on_the_number_of_processes(
    run_job: Any, tiny_config: Path, tmp_path: Path, count: int, zero_stage: int
) -> None:
    found = []
    for processes in (1, 2, 4):
        words = [f"output={tmp_path}", f"name=on_{processes}", f"parallel.zero_stage={zero_stage}"]
        words += ["training.steps=1", "schedule.warmup_steps=0", "training.validate_every=1"]
        words += [f"training.validation_images={count}", "training.batch_size=8"]
        run_job(train_run, processes, str(tiny_config), words)
        record = deterministic_metrics(tmp_path / f"on_{processes}")[0]
        assert record["step"] == 0
        found.append({name: value for name, value in record.items() if "validation" in name})
    one, *several = found
    assert one.keys() == {"validation_loss"}
    for each in several:
        assert each == pytest.approx(one, rel=1e-6)
