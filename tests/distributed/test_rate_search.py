"""Learning rate search on several processes."""

from pathlib import Path
from typing import Any

import pytest

from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training.job import open_job
from megavis.training.search.learning_rate import TrialResult, search_rates

pytestmark = pytest.mark.once


def search(launch: Launch, path: str, overrides: list[str]) -> list[TrialResult]:
    config = load_config(path, overrides).config
    with open_job(config, launch, device="cpu") as context:
        return search_rates(config, [1e5, 1e-2], context, patience=3, report=lambda _: None)


@pytest.mark.parametrize("layout", ["pipeline_model_parallel_size=2"])
def test_two_processes_match_one(
    run_job: Any, tiny_config: Path, tmp_path: Path, layout: str
) -> None:
    words = [f"output={tmp_path}", "training.steps=8", "schedule.warmup_steps=0"]
    ours = run_job(search, 2, str(tiny_config), [*words, f"parallel.{layout}"])
    alone = run_job(search, 1, str(tiny_config), [*words, "name=alone"])[0]
    assert ours[0] == ours[1]
    assert [outcome.state for outcome in ours[0]] == ["given up", "finished"]
    assert [outcome.step for outcome in ours[0]] == [outcome.step for outcome in alone]
    assert ours[0][1].validation_loss == pytest.approx(alone[1].validation_loss, rel=1e-5)
