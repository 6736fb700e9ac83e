"""Rules of this code base that no linter checks: lazy imports, sizes and names."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tiny import tiny

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "megavis").rglob("*.py"), *(ROOT / "data_tools").rglob("*.py")])
HEAVY = ("torch", "deepspeed", "megatron", "numpy", "pydantic", "webdataset", "tensorboard")


@pytest.mark.parametrize("module", ["megavis", "megavis.cli"])
def test_import_is_lazy(module):
    """`megavis --help` and a notebook's `import megavis` must not wait for torch."""
    code = f"import {module}, sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == ""


def test_megatron_warnings_about_optional_packages_are_hidden():
    code = """import megavis, warnings
warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.")
warnings.warn("Another of Megatron's.")
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert "Another of Megatron's." in process.stderr
    assert "Apex" not in process.stderr


def test_help_is_lazy_and_has_an_example():
    """`--help` of every command imports nothing heavy and shows an example."""
    from megavis.cli import COMMANDS

    code = f"""
import sys
from megavis.cli import main
for name in {list(COMMANDS)}:
    try:
        main([name.rstrip("_"), "--help"])
    except SystemExit as end:
        assert end.code == 0
assert not [name for name in {HEAVY} if name in sys.modules]
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("example: ") == len(COMMANDS)


def imports_inside_functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = [node for function in functions for node in ast.walk(function)]
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for node in inside)


def test_commands_have_no_local_imports():
    """Exceptions: the doctor, which runs without torch, and two imports that `--help` skips."""
    paths = [ROOT / "megavis/cli.py", *(ROOT / "megavis/commands").rglob("*.py")]
    counts = {path.stem: imports_inside_functions(path) for path in paths}
    assert {name: count for name, count in counts.items() if count and name != "doctor"} == {
        "cli": 1,
        "shared": 1,
    }


def run_commands(folder, *commands, code=2):
    """Run commands that exit with `code` in one process; return its modules and stderr."""
    script = f"""
import sys
from megavis.cli import main
assert [main(words) for words in {list(commands)}] == [{code}] * {len(commands)}
open("modules.txt", "w").write(" ".join(sys.modules))
"""
    # torch logs a CUDA toolkit without a GPU; CUDA_HOME points it elsewhere.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_HOME": str(folder)}
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    return set((folder / "modules.txt").read_text().split()), process.stderr


def test_config_errors_do_not_import_torch(tmp_path):
    """Errors in keys, between keys and in the layout, for every paper."""
    from megavis.config.papers import PAPER_CONFIGS, rooms

    papers = list(PAPER_CONFIGS)
    assert len(papers) >= 9
    for paper in papers:
        (tmp_path / f"{paper}.yaml").write_text(tiny(f"{{name: {paper}}}", data={"image_size": 32}))
    mistakes = ("objective.mask_ration=1", "data.image_size=0", "parallel.offload_optimizer=nvme")
    commands = [["train", f"{p}.yaml", mistake] for p in papers for mistake in mistakes]
    elsewhere = [[verb, "igpt.yaml", "seed=-1"] for verb in ("params", "search-lr", "finetune")]
    modules, _ = run_commands(tmp_path, *commands, *elsewhere, ["train", "igpt.yaml", "seed=-1"])
    assert {f"megavis.papers.{room}.config" for room in rooms()} <= modules
    assert not modules & {"torch", "deepspeed", "megatron"}


def test_schema_does_not_import_torch(tmp_path):
    modules, stderr = run_commands(tmp_path, ["schema", "--out", "schema.json"], ["schema"], code=0)
    assert not modules & {"torch", "deepspeed", "megatron"}
    assert stderr == ""


@pytest.mark.once
def test_run_imports_one_paper_and_hides_library_output(tmp_path, small_config):
    """Train with a checkpoint and samples; tests/cli/test_verbosity.py has other commands."""
    words = [f"output={tmp_path}", "training.sample_every=1", "--device", "cpu"]
    modules, stderr = run_commands(tmp_path, ["train", str(small_config), *words], code=0)
    papers = {name.split(".")[2] for name in modules if name.startswith("megavis.papers.")}
    assert papers == {"igpt"}
    # Ids of a palette need none of these: images, recordings, networks, and heads of real values.
    data = {f"megavis.data.codecs.{name}" for name in ("jpeg", "recordings", "sound")}
    networks = {f"megavis.tokenizers.{name}" for name in ("vae", "vqgan", "label_map_vae")}
    heads = {f"megavis.densities.{name}" for name in ("decoders", "diffusion", "gaussians")}
    assert not modules & (data | networks | heads | {"simplejpeg", "soundfile"})
    rest = [line for line in stderr.splitlines() if not line.startswith("step ")]
    assert rest == [f"{tmp_path}/small: on cpu, 1 process"]


def test_mp3_is_named_only_in_its_own_files():
    """Figures, relative positions and frames, introduced for MP3, serve any objective."""
    own = {ROOT / "megavis" / folder for folder in ("papers", "tokenizers")}
    texts = {path: path.read_text().lower() for path in SOURCES if not own & set(path.parents)}
    naming = [path for path, text in texts.items() if "mp3" in text or "position pred" in text]
    assert not naming


def test_files_named_in_docstrings_exist():
    """A file name in backticks, `name.py`, belongs to megavis or data_tools."""
    names = {path.name for path in SOURCES}
    stale = {
        f"{path.relative_to(ROOT)}: {found}"
        for path in SOURCES
        for found in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", path.read_text(encoding="utf-8"))
        if found not in names
    }
    assert not stale


def test_functions_have_at_most_60_lines():
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}")
    assert not long


def test_every_module_has_a_docstring():
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) is None
    ]
    assert not silent


def test_gvp_needs_no_special_case():
    """GVP's attention is neither causal nor full; visibility as data must express it."""
    own = ("megavis/papers", "megavis/tokenizers")
    paths = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
    names = ("gvp", "bridging autoregressive")
    knowing = [
        name
        for path, name in paths.items()
        if not name.startswith(own) and any(n in path.read_text("utf-8").lower() for n in names)
    ]
    assert not knowing


def test_only_context_imports_parallel_state():
    users = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if "import parallel_state" in path.read_text(encoding="utf-8")
    ]
    assert users == ["megavis/parallel/context.py"]


def test_no_conflict_markers():
    folders = ("docs", "megavis", "data_tools", "benchmarks", "launch", "yaml_configs", "tests")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts += [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    kinds = (".py", ".md", ".yaml", ".sh", ".json")
    unfinished = [
        path
        for path in texts
        if path.suffix in kinds and any(m in path.read_text("utf-8") for m in marks)
    ]
    assert not unfinished


def test_no_two_test_files_have_one_name():
    # pytest imports them by it, and refuses the second one in folders that are no packages.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
