"""All processes stay until the evaluation of the last checkpoint is done, which only one awaits."""

import sys
from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training.callbacks import validation
from megavis.training.job import open_job

pytestmark = pytest.mark.once

CHILD = "import sys, time; sys.stdin.read(); time.sleep(3); open({!r}, 'w').close()"


def seen_at_the_end(launch: Launch, path: str, measured: str) -> bool:
    """Return whether the evaluation was done when this process left training."""
    config = load_config(path, [f"output={Path(path).parent}"]).config
    command = [sys.executable, "-S", "-c", CHILD.format(measured)]
    with pytest.MonkeyPatch.context() as patch, open_job(config, launch, device="cpu") as context:
        patch.setattr(validation, "watch_command", lambda *_, **__: command)
        with validation.evaluate_during(config, context):
            pass
        return Path(measured).exists()


def test_no_process_leaves_before_the_evaluation_ends(run_job, tiny_config, tmp_path):
    path = tmp_path / "watched.yaml"
    path.write_text(f"{tiny_config.read_text()}evaluation: {{what: [loss]}}\n")
    assert run_job(seen_at_the_end, 2, str(path), str(tmp_path / "measured")) == [True, True]
