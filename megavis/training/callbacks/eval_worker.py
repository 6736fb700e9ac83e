"""Evaluate checkpoints during training, by `megavis evaluate watch` in a child process.

Training shares only a pipe with it, which closes when training ends, even if it is killed. The
child reads checkpoints, so no step waits for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megavis.config.schema import RunConfig
from megavis.config.section import EvaluationConfig
from megavis.parallel.context import ParallelContext

LOG_NAME = "watch.log"
# A launcher sets these for its own processes; the child is not one of them.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 1.0


@contextlib.contextmanager
def evaluate_during(config: RunConfig, context: ParallelContext) -> Iterator[None]:
    """Evaluate checkpoints while the block trains, if the config has `evaluation`.

    At the end, all processes wait for the newest checkpoint's metrics, at most
    `evaluation.finish_within` seconds; after an error or a signal, they do not wait.
    """
    if config.evaluation is None:
        yield
        return
    if not context.is_main:
        yield
        # Launchers end a process that stays behind the others: srun does after a minute.
        while not context.from_main(True):
            time.sleep(_POLL_SECONDS)
        return
    folder = Path(config.folder)
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    path = folder / "evaluation" / LOG_NAME
    with path.open("ab") as log:
        child = subprocess.Popen(  # noqa: S603 - our own command
            watch_command(folder, config.evaluation, seed=config.seed),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(config.evaluation),
        )
    try:
        yield
        _finish(child, path, context, within=config.evaluation.finish_within)
    finally:
        child.kill()
        child.wait()


def watch_command(folder: Path, settings: EvaluationConfig, *, seed: int) -> list[str]:
    """Return the command for the config's section."""
    options: dict[str, object] = {
        "--what": ",".join(settings.what),
        "--every": settings.every,
        "--train-images": settings.train_images,
        "--validation-images": settings.validation_images,
        "--device": settings.device,
        "--seed": seed,
        "--interval": settings.interval,
        "--reference": settings.reference,
        "--inception": settings.inception,
        "--network": settings.network,
        "--num-samples": settings.num_samples,
    }
    given = {name: value for name, value in options.items() if value is not None}
    words = [str(word) for option in given.items() for word in option]
    program = [sys.executable, "-m", "megavis.cli", "evaluate", "watch", str(folder)]
    # Features of every checkpoint of a long run would fill the disk.
    return [*program, *words, "--no-cache", "--until-input-ends"]


def _environment(settings: EvaluationConfig) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    kept["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def _finish(
    child: subprocess.Popen[bytes], log: Path, context: ParallelContext, *, within: float
) -> None:
    """Wait for the child to finish, with all processes, and warn if it did not or failed."""
    assert child.stdin is not None
    child.stdin.close()
    deadline, is_over = time.monotonic() + within, False
    while not is_over:
        # In short pieces: a collective may time out sooner than the evaluation.
        patience = min(_POLL_SECONDS, deadline - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(patience, 0.0))
        is_over = context.from_main(child.returncode is not None or time.monotonic() >= deadline)
    if child.returncode is None:
        trouble = f"not done {within:g} s after the end (evaluation.finish_within)"
    elif child.returncode:
        trouble = f"ended with code {child.returncode}"
    else:
        return
    sys.stderr.write(f"WARNING: evaluation during training: {trouble}; see {log}\n")
