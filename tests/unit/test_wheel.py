"""The wheel contains everything that commands need outside the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from children import in_child

from megavis.commands.config import find_config
from megavis.config.errors import UserError

pytestmark = pytest.mark.once
ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('dist')"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Build the wheel and return a folder with only its content."""
    source = tmp_path_factory.mktemp("source")
    for name in ("megavis", "data_tools", "yaml_configs"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD]
    built = subprocess.run(command, cwd=source, text=True, capture_output=True)
    assert built.returncode == 0, built.stderr
    [wheel] = (source / "dist").glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def python(installed, cwd, *words):
    """Run Python with the installed packages ahead of an editable install."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True)


def test_wheel_contains_all_configs_and_data_files(installed):
    wanted = [path.relative_to(ROOT) for path in (ROOT / "yaml_configs").rglob("*.*")]
    assert len(wanted) > 100
    data = [*(ROOT / "megavis").rglob("*.yaml"), *(ROOT / "megavis").rglob("*.css")]
    data += (ROOT / "megavis").rglob("*.jinja")
    assert not [path for path in wanted if not (installed / "megavis" / path).is_file()]
    assert not [path for path in data if not (installed / path.relative_to(ROOT)).is_file()]
    assert (installed / "data_tools" / "__main__.py").is_file()


def test_shipped_configs_are_found_from_any_folder(installed, tmp_path):
    name = "yaml_configs/darl/vit_l16_mse_finetune_50.yaml"
    shown = python(installed, tmp_path, "-m", "megavis.cli", "config", "show", name)
    assert shown.returncode == 0, shown.stderr
    assert f"{installed}/megavis/yaml_configs/darl/" in shown.stdout


def test_getting_started_commands(installed, tmp_path):
    """Run the commands of docs/getting-started.md at a small size."""
    text = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    block = text.split("pip install megavis-0.1.0-py3-none-any.whl\n")[1].split("```")[0]
    modules = {"megavis-data": "data_tools", "megavis": "megavis.cli"}
    small = {
        "letters": ["--images", "64"],
        "jpeg": [],
        "train": ["training.steps=2", "training.sample_every=2", "training.sample_images=2"],
    }
    small["train"] += ["model.num_layers=1", "schedule.warmup_steps=0", "--device", "cpu"]
    for line in block.strip().splitlines():
        program, *words = line.split()
        words += small.pop(words[0])
        done = python(installed, tmp_path, "-m", modules[program], *words)
        assert done.returncode == 0, done.stderr
    assert not small
    [picture] = (tmp_path / "runs" / "compose_random_patches" / "samples").glob("*.png")
    assert picture.stat().st_size > 100


def test_missing_config_lists_searched_folders(tmp_path):
    in_child(search_configs, tmp_path, folder=tmp_path)


def search_configs(tmp_path):
    """Look for configs in the working folder and in the checkout."""
    assert find_config("yaml_configs/igpt/demo.yaml") == ROOT / "yaml_configs/igpt/demo.yaml"
    with pytest.raises(UserError) as error:
        find_config("yaml_configs/igpt/demmo.yaml")
    looked = f"in {tmp_path}/yaml_configs/igpt or {ROOT}/yaml_configs/igpt"
    assert str(error.value) == (
        f"yaml_configs/igpt/demmo.yaml: no such config file {looked}; did you mean 'demo.yaml'?"
    )
    with pytest.raises(UserError, match=f"no such config file in {tmp_path}$"):
        find_config("igpt.yaml")
    own = tmp_path / "yaml_configs" / "igpt" / "demo.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: own\n")
    assert find_config("yaml_configs/igpt/demo.yaml").resolve() == own
