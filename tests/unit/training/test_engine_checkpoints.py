"""A checkpoint does not depend on `training.kernels`: plain layers go on from it, and back."""

import json

import pytest
from engine_jobs import stand_in

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.cli import main


@pytest.mark.parametrize(
    "model",
    [
        (),
        ("model.normalization=layer_norm", "model.add_bias=true", "model.attention_bias=true"),
    ],
    ids=["rms norm", "layer norm with biases"],
)
def test_kernels_change_between_checkpoints(small_config, tmp_path, model):
    words = ["schedule={decay: constant}", "training.log_every=1", f"output={tmp_path}", *model]
    words += ["training.tf32=true"]

    def train(name, steps, kernels):
        run = [f"name={name}", f"training.steps={steps}", f"training.kernels={kernels}"]
        assert main(["train", str(small_config), "--device", "cpu", *words, *run]) == 0
        manifest = read_manifest(latest_checkpoint(tmp_path / name))
        assert manifest.optimizer_step == steps
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return manifest, [json.loads(line).get("loss") for line in lines]

    wanted, whole = train("whole", 6, "torch")
    train("changed", 2, "torch")
    with stand_in():
        train("changed", 4, "transformer_engine")
    found, changed = train("changed", 6, "torch")
    assert changed == pytest.approx(whole, rel=1e-5)
    for name, entry in wanted.tensors.items():
        same = found.tensors[name]
        assert (same.shape, same.dimension) == (entry.shape, entry.dimension)
    assert found.tensors.keys() == wanted.tensors.keys()
