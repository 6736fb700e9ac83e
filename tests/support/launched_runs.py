"""A run that launchers of whole jobs start: its words, its environment, and what it must give."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

STEPS = 150
"""Enough for a scheduler to do something while the run is under way."""

ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
"""What a shell has in which this checkout is installed."""


def long_words(output: Path, name: str) -> list[str]:
    """Keys of a run that saves only where it is asked to stop."""
    return [f"output={output}", f"name={name}", f"training.steps={STEPS}", "checkpoint.every=0"]
