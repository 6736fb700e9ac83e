"""Tables of names read in both directions, and the check of released tensors."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_givt import GOLDEN, MODELS, golden

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.weights.givt import read_transformer
from megavis.weights.released import ReleasedTensors
from megavis.weights.tables import read_table, write_table
from megavis.weights.vaes import read_vae

pytestmark = pytest.mark.once


def read_golden(name):
    options = {"adapter": None, "tokenizer": None, "mode": None, "beta": None, "image_size": 32}
    classes = 10 if "labels" in golden(name) else None
    args = argparse.Namespace(source=GOLDEN / f"{name}.npz", num_classes=classes, **options)
    return read_vae(args) if name == "vae" else read_transformer(args)


@pytest.mark.parametrize("name", [*MODELS, "vae"])
def test_a_table_read_in_both_directions_returns_the_file(name):
    released = read_golden(name)
    again = write_table(released.table, read_table(released.table, released.tensors))
    assert again.keys() == released.tensors.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in released.tensors.items())


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"a": 2, "b": 3, "c": 1}, "file.npz: the weights have no c, which a network has"),
        ({"a": 2}, "file.npz: b does not belong to a network; the other tensors imply no such"),
        ({"a": 2, "b": 4}, r"file.npz: b has shape \[3\]; the other tensors imply \[4\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(wanted, sentence):
    given = {"a": torch.zeros(2), "b": torch.zeros(3)}
    tensors = ReleasedTensors(given, source=Path("file.npz"), model="a network")
    with pytest.raises(UserError, match=sentence):
        tensors.check({name: torch.zeros(size, device="meta") for name, size in wanted.items()})


def test_ignored_tensors_may_be_there():
    given = {"a": torch.zeros(2), "pooler.dense": torch.zeros(3)}
    tensors = ReleasedTensors(given, source=Path("file.npz"), model="a network")
    tensors.check({"a": torch.zeros(2)}, ignored=r"pooler\.")


def test_sizes_that_no_network_has(tmp_path, capsys):
    arrays = golden("vae")
    name = "params/cnn_encoder/Conv_0/kernel"
    np.savez(tmp_path / "vae.npz", **{**arrays, name: arrays[name][..., :31]})
    assert main(["import", "givt-vae", str(tmp_path / "vae.npz"), str(tmp_path / "run")]) == 2
    assert "vae.npz: no such network can be built" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
