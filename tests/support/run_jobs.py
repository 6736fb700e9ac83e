"""Training jobs for worker processes, and readers of their run folders."""

import json
import os
import shutil
from pathlib import Path

from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training.trainer import run_training


def train_run(launch: Launch, path: str, overrides: list[str]) -> None:
    """Train as `megavis train PATH OVERRIDES` does."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    config = load_config(path, overrides).config
    run_training(config, launch, device="cpu")


def deterministic_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the lines of `metrics.jsonl` without speeds, which vary between runs."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    speeds = ("samples_per_s", "tokens_per_s", "mfu", "save_stall_s", "forward_s")
    speeds += ("slowest_forward_s", "slowest_rank")
    return [{k: v for k, v in json.loads(line).items() if k not in speeds} for line in lines]


def rewind(source: Path, target: Path, step: int) -> None:
    """Copy a run, truncated to the checkpoint of `step` as its latest."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (target / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
