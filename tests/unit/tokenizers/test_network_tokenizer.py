"""Loading a tokenizer from its run folder, and the errors for anything else."""

from __future__ import annotations

import pytest
import torch
from small_codebook import SmallCodebook

from megavis.config.errors import UserError
from megavis.tokenizers import network_tokenizer
from megavis.tokenizers.network_tokenizer import open_tokenizer


@pytest.fixture(autouse=True)
def _register_small_codebook(monkeypatch):
    monkeypatch.setitem(
        network_tokenizer.TOKENIZERS, "small_codebook", "small_codebook:SmallCodebook"
    )


@pytest.fixture
def images():
    return torch.randint(0, 256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(0)).byte()


def test_open_tokenizer_restores_the_network(tmp_path, images):
    codebook = SmallCodebook(7).fit(images)
    opened = open_tokenizer(codebook.save_run(tmp_path / "run"))
    ids = opened.encode(images)
    assert ids.shape == (3, opened.num_tokens(8))
    assert ids.max() < opened.vocabulary_size
    assert torch.equal(ids, codebook.encode(images))
    assert opened.identity() == codebook.identity()
    assert not opened.training
    assert not any(parameter.requires_grad for parameter in opened.parameters())


def test_identity_depends_on_weights_and_settings(images):
    one, other = SmallCodebook(3).fit(images), SmallCodebook(3).fit(images)
    assert one.identity() == other.identity()
    with torch.no_grad():
        other.codes[0, 0] += 1e-6
    assert one.identity() != other.identity()
    assert SmallCodebook(3).identity() != SmallCodebook(4).identity()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "is not a run folder"),
        ("no section", "has no objective section"),
        ("kind", "objective 'igpt', which is not a tokenizer; tokenizers are: small_codebook, vae"),
        ("no checkpoint", "has no checkpoint yet"),
        ("other sizes", "does not fit the run's config.yaml"),
        ("damaged", "SHA-256 differs from the manifest"),
    ],
)
def test_invalid_tokenizer_folders_raise(tmp_path, images, case, message):
    run = SmallCodebook(3).fit(images).save_run(tmp_path / "run")
    config = run / "config.yaml"
    if case == "empty":
        config.unlink()
    elif case == "no section":
        config.write_text("- 1\n")
    elif case == "kind":
        config.write_text("objective: {name: igpt}\n")
    elif case == "no checkpoint":
        (run / "checkpoints" / "latest").unlink()
    elif case == "other sizes":
        config.write_text("objective: {name: small_codebook, entries: 4}\n")
    else:
        [weights] = run.rglob("weights.safetensors")
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_tokenizer(run)
