"""Commands on a full disk: what they have found is printed, and one sentence says what is wrong."""

import errno
import os

import pytest

from megavis.cli import main

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def run(train_small, tmp_path_factory):
    """A run of two blocks."""
    return train_small(tmp_path_factory.mktemp("full"), "model.num_layers=2", "training.steps=1")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["likelihood"], "bits per dimension"),
        (["probe", "--untrained-networks", "1"], "best on held-out training images"),
        (["figure", "depth", "--untrained-networks", "1"], "best on held-out training images"),
        (["figure", "likelihood"], "raw pixels"),
        (["figure", "neighbors"], "the 20 nearest vote"),
        (["figure", "completions", "--num-images", "2"], "PSNR of the lower halves"),
        (["sample", "--num-images", "2"], ""),
        (["sample", "--num-images", "2", "--npz", "RUN/samples.npz"], ""),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
def test_results_are_printed_before_they_are_written(run, monkeypatch, capsys, words, printed):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    command, *options = [word.replace("RUN", str(run)) for word in words]
    place = [options.pop(0), str(run)] if command == "figure" else [str(run)]
    assert main([command, *place, *options, "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert printed in shown.out
    assert shown.err.splitlines()[-1].startswith(f"error: {run}/")
    assert shown.err.endswith(": No space left on device\n")
