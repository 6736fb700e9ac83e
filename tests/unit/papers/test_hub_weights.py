"""Weights of folders of transformers: in several files, in half precision, under newer names."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from megavis.config.errors import UserError
from megavis.weights.released import read_hub_weights
from megavis.weights.vits import with_older_names

pytestmark = pytest.mark.once


def write_index(folder, **files):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_files_are_read_by_their_index(tmp_path):
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4.0)}
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    write_index(tmp_path, a="a.safetensors", b="b.safetensors")
    found = read_hub_weights(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_compared_in_float32(tmp_path, dtype):
    weight = torch.linspace(-1, 1, 7).to(dtype)
    save_file({"weight": weight, "count": torch.tensor([3])}, tmp_path / "model.safetensors")
    found = read_hub_weights(tmp_path)
    assert found["weight"].dtype == torch.float32
    assert torch.equal(found["weight"].to(dtype), weight)
    assert found["count"].dtype == torch.int64


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a": "b.safetensors"}, "lists a, which b.safetensors does not have"),
        ({"a": "absent.safetensors"}, "lists absent.safetensors, which is missing from the folder"),
        ({"a": "../b.safetensors"}, "names a file outside of the folder, ../b.safetensors"),
        ({"a": 3}, "has no weight_map of names of files"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path, files, sentence):
    save_file({"b": torch.zeros(1)}, tmp_path / "b.safetensors")
    write_index(tmp_path, **files)
    with pytest.raises(UserError, match=re.escape(sentence)):
        read_hub_weights(tmp_path)


def test_a_folder_of_pickled_weights_says_what_it_has(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"missing; the folder has pytorch_model\.bin; save the"):
        read_hub_weights(tmp_path)


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        (
            "decoder.decoder_encoder.layer.0.layernorm_before.weight",
            "decoder.decoder_layers.0.layernorm_before.weight",
        ),
        (
            "vit.layers.11.attention.q_proj.bias",
            "vit.encoder.layer.11.attention.attention.query.bias",
        ),
        (
            "decoder.decoder_layers.1.attention.o_proj.weight",
            "decoder.decoder_layers.1.attention.output.dense.weight",
        ),
        ("vit.layers.0.mlp.fc1.weight", "vit.encoder.layer.0.intermediate.dense.weight"),
        ("vit.layers.0.mlp.fc2.weight", "vit.encoder.layer.0.output.dense.weight"),
        (
            "vit.encoder.layer.0.attention.attention.query.weight",
            "vit.encoder.layer.0.attention.attention.query.weight",
        ),
        ("decoder.decoder_pos_embed", "decoder.decoder_pos_embed"),
    ],
)
def test_names_of_both_versions_of_transformers(newer, older):
    assert [*with_older_names({newer: torch.zeros(1)})] == [older]
