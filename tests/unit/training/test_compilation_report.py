"""The line about compiled blocks after the first step, and what is said where none could be."""

import pytest

from megavis.model import compiled_blocks, kernels
from megavis.model.compiled_blocks import Compilation
from megavis.training.callbacks.callback import StepState
from megavis.training.callbacks.compilation import ReportCompilation

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def kernels_are_restored(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    yield
    kernels.choose_kernels("auto")
    compiled_blocks.take_compilation()


def said(context, monkeypatch, capsys, *compilations):
    """Return what a run writes whose steps compile these."""
    report = ReportCompilation(context)
    report.began -= 60
    for step, compilation in enumerate(compilations, start=1):
        monkeypatch.setattr(compiled_blocks._Process, "compilation", compilation)
        report(StepState(step, 9, 1.0, None))
    return capsys.readouterr().err


def test_the_first_step_is_timed_whole(context, monkeypatch, capsys):
    line = said(context, monkeypatch, capsys, Compilation(graphs=2, seconds=1.0), Compilation())
    assert line.startswith("first step in 60.")
    assert line.endswith(" s: blocks compiled, 2 graphs, kept in /kept\n")


def test_nothing_is_said_where_nothing_was_compiled(context, monkeypatch, capsys):
    assert said(context, monkeypatch, capsys, Compilation(), Compilation()) == ""


def test_a_failure_is_said_with_its_reason(context, monkeypatch, capsys):
    line = said(context, monkeypatch, capsys, Compilation(failure="no compiler"))
    assert line.startswith("WARNING: 1 of 1 processes could not compile whole blocks: no compiler;")
    assert kernels.chosen_kernels() == "regions"


def test_a_later_failure_names_its_step(context, monkeypatch, capsys):
    line = said(context, monkeypatch, capsys, Compilation(), Compilation(failure="too large"))
    assert line == "WARNING: step 2: process 0 no longer runs compiled blocks: too large\n"
