"""Image grids during training."""

import errno

import pytest
import torch

from megavis.checkpoint.format.folder import saved_steps
from megavis.cli import main
from megavis.sampling.pictures import Gallery
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


def test_training_continues_without_a_grid_that_takes_too_much_memory(
    small_config, tmp_path, monkeypatch, capsys
):
    """The next grid has half as many images; the one after it as many as fitted."""
    drawn = []
    real = Gallery.plot

    def plot(self, inference, examples, *, num_images):
        drawn.append((num_images, inference.captures))
        if num_images > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, inference, examples, num_images=num_images)

    monkeypatch.setattr(Gallery, "plot", plot)
    words = [f"output={tmp_path}", "training.sample_every=1", "training.sample_images=8"]
    words += ["training.steps=4", "data.validation="]
    assert main(["train", str(small_config), "--device", "cpu", *words]) == 0
    # Without CUDA graphs, whose memory training would lack afterwards.
    assert drawn == [(8, False), (4, False), (2, False), (2, False)]
    stderr = capsys.readouterr().err
    assert stderr.count("WARNING") == 1
    assert "WARNING: image grid of step 1 takes more memory than is free" in stderr
    names = sorted(path.name for path in (tmp_path / "small" / "samples").iterdir())
    assert names == ["step-00000003.png", "step-00000004.png"]


def test_not_even_one_image_fits(small_config, tmp_path, monkeypatch, capsys):
    def plot(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Gallery, "plot", plot)
    words = [f"output={tmp_path}", "training.sample_every=1", "training.sample_images=2"]
    words += ["training.steps=4", "data.validation="]
    assert main(["train", str(small_config), "--device", "cpu", *words]) == 0
    assert capsys.readouterr().err.count("WARNING") == 1
    assert saved_steps(tmp_path / "small") == [4]
