"""What all tests share: one small folder of real palette shards, and a machine without GPUs."""

import os
from pathlib import Path

import pytest

# The references are those of a CPU, so the tests compute on it, wherever they run: set before
# anything imports torch, and inherited by every process that a test starts.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
