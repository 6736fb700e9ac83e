"""The rules of the house that no linter knows: import direction, lazy imports, sizes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "megavis").rglob("*.py"), *(ROOT / "data_tools").rglob("*.py")])
HEAVY = ("torch", "deepspeed", "megatron", "numpy", "pydantic", "webdataset", "tensorboard")


def test_imports_run_one_way(tmp_path):
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--cache-dir", tmp_path]
    process = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("module", ["megavis", "megavis.cli"])
def test_importing_costs_nothing(module):
    """`megavis --help` and a notebook's `import megavis` must not wait for torch."""
    code = f"import {module}, sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == ""


def test_what_megatron_says_of_packages_that_are_not_used_is_not_shown():
    code = """import megavis, warnings
warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
warnings.warn("Another of Megatron's.")
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert "Another of Megatron's." in process.stderr
    assert "Apex" not in process.stderr


def test_help_of_every_command_is_quick_and_has_an_example():
    """The parsers of all commands are built without a heavy import; each shows how it is used."""
    from megavis.cli import _COMMANDS

    code = f"""
import sys
from megavis.cli import main
for name in {list(_COMMANDS)}:
    try:
        main([name.rstrip("_"), "--help"])
    except SystemExit as end:
        assert end.code == 0
assert not [name for name in {HEAVY} if name in sys.modules]
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("example: ") == len(_COMMANDS)


def test_a_paper_is_named_by_its_own_files_alone():
    """What this paper brought (figures, relative positions, frames) serves any objective."""
    own = {ROOT / "megavis" / folder for folder in ("objectives", "tokenizers")}
    texts = {path: path.read_text().lower() for path in SOURCES if not own & set(path.parents)}
    naming = [path for path, text in texts.items() if "mp3" in text or "position pred" in text]
    assert not naming


def test_no_file_is_longer_than_400_lines():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {str(path): length for path, length in lengths.items() if length > 400}


def test_no_function_is_longer_than_60_lines():
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}")
    assert not long


def test_every_module_says_what_it_is():
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not silent


def test_two_streams_need_no_special_case():
    """GVP's attention is neither causal nor full; visibility as data has to be enough for it."""
    own = ("megavis/objectives", "megavis/tokenizers")
    paths = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    names = ("gvp", "bridging autoregressive")
    knowing = [
        name
        for path, name in paths.items()
        if not name.startswith(own) and any(n in path.read_text("utf-8").lower() for n in names)
    ]
    assert not knowing


def test_only_one_file_touches_megatron_s_parallel_state():
    users = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if "import parallel_state" in path.read_text(encoding="utf-8")
    ]
    assert users == ["megavis/parallel/context.py"]
