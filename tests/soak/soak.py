"""Train through half an hour of faults; the loss curve must equal that of an uninterrupted run.

    PYTHONPATH=. python tests/soak/soak.py --minutes 30 --seed 0 --folder /tmp/soak

Trains a small iGPT repeatedly on one to four processes while injecting random faults (faults.py).
In odd rounds all starts have one layout: metrics and weights must equal those of an uninterrupted
run bit for bit. In even rounds each start draws a layout: metrics must agree within `_SLACK` times
the largest difference between uninterrupted runs of these layouts. Prints a summary; the exit code
is 1 if any guarantee was violated.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from pathlib import Path

from faults import AT_ANY_TIME, FAULTS, PATIENCE, ViolationError, expect, leftovers
from job import LAYOUTS, Job, newest_step

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import damages, read_manifest
from megavis.training.metrics import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "support"))

from run_jobs import deterministic_metrics  # noqa: E402 - in tests/support

STEPS = 120
_SLACK = 3.0
_AT_START = 0.1
"""Share of faults at any time, also before the first step."""
_COUNTS = ("checkpoints_not_saved",)
"""Metrics that faults may change."""

Curve = list[dict[str, float]]


class Soak:
    """Runs in one folder, and statistics so far."""

    def __init__(self, folder: Path, seed: int, layouts: list[str]) -> None:
        self.folder, self.draw, self.layouts = folder, random.Random(seed), layouts
        self.rounds_folder = folder / f"seed-{seed}"
        self.rounds_folder.mkdir(parents=True)
        self.config = make_config(folder)
        self.began = time.monotonic()
        self.faults: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        self.violations: list[str] = []
        self.set_aside = self.steps_again = 0
        self.worst = 0.0
        self.unbroken: dict[str, Path] = {}
        self.tolerance = 0.0

    def log(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f} s] {text}", flush=True)

    def train_unbroken(self) -> None:
        """Train once in every layout without faults; measure their differences by rounding."""
        for layout in self.layouts:
            run_folder = self.folder / "unbroken" / layout
            self.unbroken[layout] = run_folder
            if newest_step(run_folder) == STEPS:
                continue
            job = Job(self.config, run_folder, layout, self.folder)
            codes = job.wait(seconds=300)
            if set(codes) != {0}:
                sys.exit(f"the unbroken run of {layout} ended with {codes}:\n{job.log()[-2000:]}")
            self.log(f"unbroken {layout}: last loss {curve(run_folder)[-1]['loss']:.9f}")
        pairs = itertools.combinations(map(curve, self.unbroken.values()), 2)
        measured = max((largest_difference(ours, theirs) for ours, theirs in pairs), default=0.0)
        self.tolerance = _SLACK * measured
        self.log(f"layouts differ by rounding: {measured:.2e}; tolerance {self.tolerance:.2e}")
        self.began = time.monotonic()

    def round(self, number: int, until: float) -> None:
        """Train a run through faults to its end, and compare it."""
        fixed = self.draw.choice(self.layouts) if number % 2 else None
        run_folder = self.rounds_folder / f"round-{number:03d}"
        finished = False
        while not finished:
            layout = fixed or self.draw.choice(self.layouts)
            job = Job(self.config, run_folder, layout, self.rounds_folder)
            try:
                self.disturb(job, quiet=time.monotonic() > until)
            except ViolationError as violation:
                self.violate(f"round {number}, start {Job.starts}, {layout}: {violation}", job)
            job.kill()
            finished = all(process.exitcode == 0 for process in job.processes)
        self.compare(run_folder, fixed)

    def disturb(self, job: Job, *, quiet: bool) -> None:
        """Inject faults into a job until it ends."""
        first = newest_step(job.run_folder)
        while not job.is_over():
            names = list(FAULTS)
            if self.draw.random() < _AT_START:
                time.sleep(self.draw.uniform(0.0, 2.0))
                names = list(AT_ANY_TIME)
            elif not quiet:
                target = first + self.draw.randint(1, 30)
                came = job.wait_for(lambda target=target: reached(job, target), seconds=180)
                expect(came, f"the run resumes from step {first} to step {target}")
                time.sleep(self.draw.uniform(0.0, 0.2))
            if job.is_over() or (quiet and job.wait(seconds=300)):
                break
            name = self.draw.choice(names)
            before = last_step(job.run_folder)
            FAULTS[name](job, self.draw)
            self.faults[name] += 1
            self.log(f"{job.layout}, step {before}: {name}")
            first = last_step(job.run_folder)
        self.check_end(job)

    def check_end(self, job: Job) -> None:
        log = job.log()
        self.set_aside += log.count("WARNING: resuming from")
        expect(2 not in job.wait(seconds=0), f"no start exits with a user error: {log[-500:]}")
        lost = last_step(job.run_folder) - newest_step(job.run_folder)
        self.steps_again += max(0, lost)

    def compare(self, run_folder: Path, fixed: str | None) -> None:
        """Compare a finished run with the uninterrupted one."""
        self.rounds["one layout" if fixed else "changing layouts"] += 1
        theirs = self.unbroken[fixed or self.layouts[0]]
        difference = largest_difference(curve(run_folder), curve(theirs))
        self.log(f"{run_folder.name}, {fixed or 'changing layouts'}: differs by {difference:.2e}")
        try:
            if fixed is not None:
                expect(curve(run_folder) == curve(theirs), f"{run_folder.name}: metrics are equal")
                expect(
                    hashes(run_folder) == hashes(theirs), f"{run_folder.name}: weights are equal"
                )
            self.worst = max(self.worst, difference)
            expect(difference <= self.tolerance, f"{run_folder.name}: {difference:.2e} is rounding")
            left = leftovers(run_folder)
            expect(not left, f"{run_folder.name} leaves no temporary files, but has {left}")
            latest = latest_checkpoint(run_folder)
            assert latest is not None
            expect(not list(damages(latest)), f"{run_folder.name}: the last checkpoint is whole")
        except ViolationError as violation:
            self.violate(str(violation))

    def violate(self, text: str, job: Job | None = None) -> None:
        self.violations.append(text)
        self.log(f"VIOLATION: {text}")
        if job is not None:
            for log in job.logs:
                self.log(log.read_text(errors="replace")[-4000:] if log.exists() else "no log")

    def summary(self) -> str:
        minutes = (time.monotonic() - self.began) / 60
        lines = [f"{minutes:.0f} minutes, {sum(self.faults.values())} faults, {Job.starts} starts"]
        lines += [f"{count:5d}  {name}" for name, count in sorted(self.faults.items())]
        lines += [
            f"{self.set_aside:5d}  resumes from the checkpoint before a damaged one",
            f"{self.steps_again:5d}  repeated steps",
            *(f"{count:5d}  runs of {name}" for name, count in sorted(self.rounds.items())),
            f"largest difference {self.worst:.2e}, tolerance {self.tolerance:.2e}",
            f"{len(self.violations)} violations",
            *self.violations,
        ]
        return "\n".join(lines)


def make_config(folder: Path) -> Path:
    """Write a config that trains in seconds, and its shards, unless they exist."""
    from data_tools.__main__ import main

    path = folder / "soak.yaml"
    if path.exists():
        return path
    crops, palette = folder / "crops", folder / "palette.npy"
    make = ["--size", "16", "--crops", "200", "--validation-crops", "40", "--seed", "0"]
    expect(main(["photographs", str(crops), *make]) == 0, "photographs are cut")
    fit = ["--out", str(palette), "--num-colors", "64", "--pixels", "20000", "--size", "8"]
    expect(main(["palette", "fit", str(crops / "train"), *fit]) == 0, "a palette is fitted")
    for part in ("train", "validation"):
        options = ["--palette", str(palette), "--out", str(folder / part), "--size", "8"]
        expect(main(["palette", "shards", str(crops / part), *options]) == 0, "shards are written")
    path.write_text(
        f"""\
name: soak
objective: {{name: igpt, vocabulary_size: 64}}
model: {{num_layers: 4, hidden_size: 64, num_attention_heads: 4, positions: rope_2d}}
data: {{train: {folder}/train, validation: {folder}/validation, image_size: 8, threads: 2}}
optimizer: {{learning_rate: 1e-3, gradient_clipping: 0.5, ema_decay: 0.9}}
schedule: {{warmup_steps: 10}}
training:
  steps: {STEPS}
  batch_size: 4
  micro_batch_size: 1
  log_every: 1
  validate_every: 25
  validation_images: 16
  hang_timeout: {PATIENCE}
checkpoint: {{every: 7, keep_last: 3}}
"""
    )
    return path


def curve(run_folder: Path) -> Curve:
    """Return the metrics without speeds and `_COUNTS`."""
    lines = deterministic_metrics(run_folder)
    return [{k: v for k, v in line.items() if k not in _COUNTS} for line in lines]


def largest_difference(ours: Curve, theirs: Curve) -> float:
    """Return the largest relative difference of two runs' metrics; infinite if keys differ."""
    if [sorted(line) for line in ours] != [sorted(line) for line in theirs]:
        return float("inf")
    return max(
        abs(mine[key] - yours[key]) / max(abs(yours[key]), 1e-30)
        for mine, yours in zip(ours, theirs, strict=True)
        for key in mine
    )


def hashes(run_folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the last checkpoint's files."""
    latest = latest_checkpoint(run_folder)
    assert latest is not None
    return {name: stored.sha256 for name, stored in read_manifest(latest).files.items()}


def last_step(run_folder: Path) -> int:
    """Return the newest logged step; 0 before the first."""
    return max([0, *(int(line["step"]) for line in read_metrics(run_folder))])


def reached(job: Job, step: int) -> bool:
    """Return whether a job has logged a step."""
    return job.has_begun() and last_step(job.run_folder) >= min(step, STEPS)


def main() -> int:
    """Run for `--minutes`; return 1 if a guarantee was violated."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, required=True, help="uninterrupted runs are reused by this code"
    )
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="separated by commas")
    args = parser.parse_args()
    soak = Soak(args.folder, args.seed, args.layouts.split(","))
    soak.train_unbroken()
    until = soak.began + 60 * args.minutes
    for number in itertools.count(1):
        if time.monotonic() > until:
            break
        soak.round(number, until)
    text = soak.summary()
    print(text)
    (soak.rounds_folder / "summary.txt").write_text(text + "\n")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
