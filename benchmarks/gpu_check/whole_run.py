"""Stage 9: `megavis train` from start to end, killed between two saves, resumed, with a grid."""

from __future__ import annotations

import ctypes
import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_check.models import CONFIGS, TINY, write_palette_shards
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.gpu_check.stages import end_with_parent
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.parallel.launch import Launch

_POLL = 0.02
# Speeds and memory vary between equal runs.
_COMPARED = ("step", "loss", "grad_norm", "lr")


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts."""
    precisions = ("float32",) if settings.small else ("float32", "bf16")
    return {f"a whole run, {p}": functools.partial(_whole_run, p) for p in precisions}


def _whole_run(precision: str, launch: Launch, settings: Settings) -> list[Row]:
    folder = settings.folder / "scratch" / f"whole_run_{precision}"
    shutil.rmtree(folder, ignore_errors=True)
    words = _words(folder, precision, settings)
    began = time.monotonic()
    _finish(_start([*words, "name=whole"]))
    seconds = time.monotonic() - began
    killed_at = _kill_after_a_save(folder / "killed", [*words, "name=killed"])
    _finish(_start([*words, "name=killed"]))
    whole, killed = (result_of(folder / name) for name in ("whole", "killed"))
    same = whole == killed
    grids = len(list((folder / "whole" / "samples").glob("*.png")))
    name = f"igpt/demo.yaml, ZeRO-1, {precision}"
    return [
        Row(f"{name}: a run, start to end", seconds, "s"),
        Row(f"{name}: killed after a save", killed_at, "step", detail={"of": len(whole[0])}),
        Row(f"{name}: resumed, metrics and weights are the same", same, "", "yes", same),
        Row(f"{name}: grids of samples", grids, "", "1 or more", grids > 0),
    ]


def _words(folder: Path, precision: str, settings: Settings) -> list[str]:
    side, steps = (4, 60) if settings.small else (12, 200)
    shards = write_palette_shards(folder, count=8 if settings.small else 64, size=side)
    return [
        *(TINY if settings.small else ()),
        f"data.train={shards}",
        "data.validation=null",
        f"data.image_size={side}",
        f"output={folder}",
        f"training.steps={steps}",
        "training.validate_every=0",
        "training.log_every=1",
        f"training.sample_every={steps}",
        "training.sample_images=4",
        f"training.precision={precision}",
        f"training.deterministic={str(settings.on_gpu).lower()}",
        "parallel.zero_stage=1",
        "schedule.warmup_steps=5",
        f"checkpoint.every={steps // 6}",
        f"--device={settings.device}",
    ]


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megavis.cli", "train", str(CONFIGS / "igpt/demo.yaml")]
    # A stopped part is killed, and must not leave a run behind.
    libc = ctypes.CDLL(None)
    return subprocess.Popen(  # noqa: S603 - ourselves
        [*command, *words], preexec_fn=lambda: end_with_parent(libc)
    )


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"megavis train ended with {process.returncode}; see worker.log")


def _kill_after_a_save(run: Path, words: list[str]) -> int:
    """Return the step of the save after which the run was killed."""
    process = _start(words)
    try:
        while (found := latest_checkpoint(run)) is None:
            if process.poll() is not None:
                raise RuntimeError(f"megavis train ended with {process.returncode} before a save")
            time.sleep(_POLL)
    finally:
        process.kill()
        code = process.wait()
    if code != -signal.SIGKILL:
        raise RuntimeError("the run was over before it could be killed")
    return int(found.name.removeprefix("step-"))


def result_of(run: Path) -> tuple[list[dict[str, float]], str]:
    """Return a run's losses, gradient norms and rates, and the hash of its last weights."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    metrics = [{name: json.loads(line)[name] for name in _COMPARED} for line in lines]
    checkpoint = latest_checkpoint(run)
    if checkpoint is None:
        raise RuntimeError(f"{run} has no checkpoint")
    with CheckpointReader(checkpoint) as reader:
        return metrics, reader.weights_sha256()
