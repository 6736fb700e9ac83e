"""Paths of results and names of runs are checked before a command works."""

import pytest

from megavis.cli import main

pytestmark = pytest.mark.once

WRITERS = [
    ["parity", "CONFIG", "--processes", "1", "--json"],
    ["plan", "CONFIG", "--gpus", "1", "--write"],
    ["bench", "CONFIG", "--profile"],
    ["ensemble", "runs/none", "--json"],
]


@pytest.mark.parametrize("words", WRITERS, ids=lambda words: words[0])
def test_results_need_a_folder(tmp_path, capsys, words):
    missing = tmp_path / "mistyped" / "result"
    assert main([*words, str(missing)]) == 2
    assert capsys.readouterr().err == (
        f"error: {words[-1]}: there is no folder {missing.parent}; create it, or name another\n"
    )
    assert main([*words, str(tmp_path)]) == 2
    assert f"{words[-1]}: {tmp_path} is a folder; name a file" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["huggingface", "givt-vae"])
def test_imported_runs_need_a_valid_name(tmp_path, capsys, form):
    target = tmp_path / "vit base"
    assert main(["import", form, str(tmp_path / "source"), str(target)]) == 2
    error = capsys.readouterr().err
    assert f"error: {target}: a run's name has only letters" in error
    assert "'vit base' does not" in error
    assert not target.exists()
