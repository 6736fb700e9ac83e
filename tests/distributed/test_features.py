"""Features and probes do not depend on the layout that saved or reads a run."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_jobs import train_run

from megavis.cli import main
from megavis.evaluation.features import FOLDER, cached_features
from megavis.parallel.launch import Launch

pytestmark = pytest.mark.once
SPLIT = ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=3"]


def probe(launch: Launch, run_folder: str, tensor_size: int) -> None:
    """Run `megavis probe` as under a launcher; it caches all features."""
    os.environ.update(launch.environment())
    words = ["--untrained-networks", "1", "--train-images", "150"]
    words += ["--device", "cpu", "--tensor-parallel", str(tensor_size)]
    assert main(["probe", run_folder, *words]) == 0


def test_probe_is_the_same_in_every_layout(run_job: Any, tiny_config: Path, tmp_path: Path) -> None:
    words = [f"output={tmp_path}", "parallel.sequence_parallel=true", *SPLIT]
    run_job(train_run, 4, str(tiny_config), words)
    folder = tmp_path / "tiny"
    found, layers = [], []
    # One process, data parallelism, and tensor parallelism.
    for processes, tensor_size in ((1, 1), (2, 1), (4, 2)):
        run_job(probe, processes, str(folder), tensor_size)
        found.append(json.loads((folder / "evaluation" / "probe.json").read_text()))
        layers.append(read_features(folder))
    alone, *others = found
    assert len(alone["trained"]) == 4
    for name, features in layers[0].items():
        # Data parallelism does not change batches, so features are bit-identical.
        np.testing.assert_array_equal(layers[1][name], features)
        np.testing.assert_allclose(layers[2][name], features, rtol=1e-4, atol=1e-5)
    for other in others:
        for one, two in zip(alone["trained"], other["trained"], strict=True):
            assert (one["layer"], one["accuracy"]) == (two["layer"], two["accuracy"])


def read_features(folder: Path) -> dict[str, np.ndarray]:
    """Return the cached features of a run by file name, and delete the files."""
    from safetensors.numpy import load_file

    found = {file.path.name: load_file(file.path)["layers"] for file in cached_features(folder)}
    assert len(found) == 4
    for name in found:
        (folder / FOLDER / name).unlink()
    return found
