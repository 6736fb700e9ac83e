"""Image grids during training."""

import errno

import pytest

from megavis.checkpoint.format.folder import saved_steps
from megavis.cli import main
from megavis.training.callbacks import validation

pytestmark = pytest.mark.once


def test_training_continues_without_a_grid_that_cannot_be_written(
    small_config, tmp_path, monkeypatch, capsys
):
    real = validation.save_png

    def fail_once(path, pixels):
        if path.name == "step-00000001.png":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, pixels)

    monkeypatch.setattr(validation, "save_png", fail_once)
    words = [f"output={tmp_path}", "training.sample_every=1", "training.sample_images=2"]
    assert main(["train", str(small_config), "--device", "cpu", *words]) == 0
    stderr = capsys.readouterr().err
    assert stderr.count("WARNING: image grid of step 1 not written: [Errno 28] No space") == 1
    run = tmp_path / "small"
    assert [path.name for path in (run / "samples").iterdir()] == ["step-00000002.png"]
    assert saved_steps(run) == [2]
