"""What all tests share: small shards, small models, and a machine without GPUs."""

import gc
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from process_state import differences, end_process_groups, process_state, threads_left

from megavis.parallel.limits import allow_open_files

NUM_COLORS = 32
_ALL_ONCE = "pytestmark = pytest.mark.once"

# The references are those of a CPU, so the tests compute on it, wherever they run: set before
# anything imports torch, and inherited by every process that a test starts.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Inductor compiles in the thread that asks: threads of its pool would outlive the tests.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# As every job does: done here, so that it is no change of the first file's.
allow_open_files()
# A shell that runs the tests in the background ignores it, and Jupyter's client ends that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the order in which files, and the tests of each, run."""
    parser.addoption("--order", default="given", help="given, reverse, or a number that seeds one")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests are all deselected, which takes half of the collection."""
    if config.option.markexpr != "not once" or collection_path.suffix != ".py":
        return None
    return True if f"\n{_ALL_ONCE}\n" in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order whole files, whose fixtures then still open once, and the tests within each."""
    order = config.getoption("order")
    if order == "given":
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    for group in (groups, *groups):
        group.reverse() if order == "reverse" else random.Random(int(order)).shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """Keep Python's collector, which each run calls, from looking through what was imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """End the run if one of pytest-xdist's processes dies, and name the test it was running.

    Otherwise the others first finish the files that they were given, which takes minutes.
    """
    pytest.exit(f"a test process died while it ran {crashitem}", returncode=1)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `train` and `validation` shards of 8² photographs and their palette."""
    from data_tools.__main__ import main

    folder = tmp_path_factory.mktemp("shards")
    crops, palette = folder / "crops", folder / "palette.npy"
    make = ["--size", "16", "--crops", "200", "--validation-crops", "40", "--seed", "0"]
    assert main(["photographs", str(crops), *make]) == 0
    fit = ["--out", str(palette), "--num-colors", "64", "--pixels", "20000", "--size", "8"]
    assert main(["palette", "fit", str(crops / "train"), *fit]) == 0
    for part in ("train", "validation"):
        source, target = str(crops / part), str(folder / part)
        options = ["--palette", str(palette), "--out", target, "--size", "8"]
        assert main(["palette", "shards", source, *options]) == 0
    return folder


@pytest.fixture(scope="session")
def image_shards(shards: Path) -> Path:
    """A folder with `train` and `validation` jpeg shards of the same crops, 16²."""
    from image_shards import write_image_shards

    folder = shards / "images"
    for part in ("train", "validation"):
        write_image_shards(shards / "crops" / part, folder / part)
    return folder


@pytest.fixture(scope="session")
def tiny_config(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config that trains on them in seconds: three blocks, so that stages are uneven."""
    path = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    path.write_text(
        f"""\
name: tiny
output: {path.parent}/runs
objective: {{name: igpt, vocabulary_size: 64}}
model: {{num_layers: 3, hidden_size: 32, num_attention_heads: 4}}
data: {{train: {shards}/train, validation: {shards}/validation, image_size: 8}}
optimizer: {{learning_rate: 3e-3, gradient_clipping: 0.5}}
schedule: {{warmup_steps: 10}}
training: {{steps: 12, batch_size: 8, micro_batch_size: 2, log_every: 1}}
checkpoint: {{every: 4, keep_last: 10}}
"""
    )
    return path


@pytest.fixture(scope="module", autouse=True)
def _process_is_left_as_it_was():
    """A file that changes its process would fail files after it, and the blame fall on these."""
    state, threads = process_state(), set(threading.enumerate())
    yield
    found = []
    job = sys.modules.get("torch.distributed")
    if job is not None and job.is_initialized():
        from megavis.parallel.context import close_context

        close_context()
        found.append("a job is open")
    end_process_groups()
    found += differences(state, process_state())
    found += [f"thread {name!r} runs" for name in threads_left(threads)]
    if found:
        pytest.fail("left by the tests of this file: " + "; ".join(found))


@pytest.fixture(scope="module")
def context():
    """A job of this process alone, left when the module's tests are done."""
    yield from _job()


@pytest.fixture
def brief_context():
    """A job of this process alone, left after the test: for modules that also call commands."""
    yield from _job()


def _job():
    from megavis.parallel.context import close_context, open_context
    from megavis.parallel.launch import read_launch

    yield open_context(read_launch({}), device="cpu")
    close_context()


@pytest.fixture
def build_paper(context, tmp_path):
    """Build a model of any paper from the text of a config; every weight random.

    `std` is the deviation of the weights: larger than at the start of training, so that what came
    before matters; None keeps the initial weights. `visibility` takes the place of the paper's own.
    """
    import torch

    from megavis.config.load import load_config
    from megavis.model.inference import Inference
    from megavis.model.stack import LayerStack, LocalLayers
    from megavis.papers import build_objective

    def build_paper(text, *words, std=0.5, visibility=None):
        path = tmp_path / "small.yaml"
        path.write_text(text)
        config = load_config(path, words).config
        objective = build_objective(config, context)
        if visibility is not None:
            objective.core = objective.core.with_stack(visibility_kind=visibility)
        plans = objective.layer_plans()
        layers = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
        torch.manual_seed(0)
        for _, parameter in layers.named_parameters():
            if std is not None:
                torch.nn.init.normal_(parameter, std=std)
        return objective, Inference(layers, context)

    return build_paper


@pytest.fixture
def build(build_paper):
    """Build an iGPT of any size; `path` is not used."""
    from tiny import tiny

    text = tiny(f"{{name: igpt, vocabulary_size: {NUM_COLORS}}}", data={"image_size": 4})
    return lambda path, *words: build_paper(text, *words)


@pytest.fixture
def build_gvp(build_paper):
    """Build a GVP of nine patches."""
    from tiny import VIT, tiny

    text = tiny(
        "{name: gvp, patch_size: 4, num_groups: 3}",
        model={**VIT, "num_layers": 3},
        data={"image_size": 12},
    )
    return lambda *words: build_paper(text, *words)


@pytest.fixture(scope="session")
def shard_folders(tmp_path_factory):
    """Three shard folders of 4² pixels: three classes, each of its own colours."""
    from data_tools.__main__ import main as data_tools
    from megavis.tokenizers.palette import Palette

    root = tmp_path_factory.mktemp("shards")
    random = np.random.default_rng(0)
    Palette(random.uniform(-1, 1, (NUM_COLORS, 3)).astype(np.float32)).save(root / "palette.npy")
    for split, count in (("train", 40), ("validation", 12), ("selection", 12)):
        for label, tint in enumerate(([230, 30, 30], [30, 230, 30], [30, 30, 230])):
            folder = root / "images" / split / f"class-{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(-90, 91, (4, 4, 3)) + tint
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        palette = ["--palette", str(root / "palette.npy"), "--size", "4"]
        data_tools(
            [
                "palette",
                "shards",
                str(root / "images" / split),
                "--out",
                str(root / split),
                *palette,
            ]
        )
    return root


@pytest.fixture(scope="session")
def small_config(shard_folders):
    """A config file of an iGPT that learns in a second, for others to be based on."""
    path = shard_folders / "small.yaml"
    path.write_text(
        f"""\
name: small
objective: {{name: igpt, vocabulary_size: {NUM_COLORS}}}
model: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2}}
data: {{train: {shard_folders}/train, validation: {shard_folders}/validation, image_size: 4}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 2, batch_size: 8}}
"""
    )
    return path


@pytest.fixture(scope="session")
def train_small(small_config):
    """Return a function that trains `small_config` with overrides and returns the run folder."""
    from megavis.cli import main

    def train(output, *overrides):
        words = [str(small_config), f"output={output}", *overrides]
        assert main(["train", *words, "--device", "cpu"]) == 0
        return output / "small"

    return train
