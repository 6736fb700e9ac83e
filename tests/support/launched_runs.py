"""A run for tests of launchers: its overrides and environment."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

STEPS = 150
"""Enough for a scheduler to act while the run trains."""

ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of a shell with this checkout installed."""


def long_words(output: Path, name: str) -> list[str]:
    """Return the overrides of a run that saves only when asked to stop."""
    return [f"output={output}", f"name={name}", f"training.steps={STEPS}", "checkpoint.every=0"]
