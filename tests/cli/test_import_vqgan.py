"""A released VQGAN becomes a run that is a tokenizer; what is none is refused."""

import pytest
import torch
from safetensors.torch import save_file

from megavis.cli import main
from megavis.tokenizers.base import open_tokenizer
from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan_network import VQGANNetwork

SHAPE = VQGANShape(codebook_size=20, code_size=6, filters=32, multipliers=(1, 2), latent_channels=8)


@pytest.fixture
def released():
    torch.manual_seed(0)
    tensors = dict(VQGANNetwork(SHAPE).state_dict())
    return {**tensors, "loss.discriminator.main.0.weight": torch.zeros(3)}


def test_a_checkpoint_becomes_a_tokenizer(released, tmp_path, capsys):
    torch.save({"state_dict": released}, tmp_path / "last.ckpt")
    assert main(["import", "vqgan", str(tmp_path / "last.ckpt"), str(tmp_path / "run")]) == 0
    tokenizer = open_tokenizer(tmp_path / "run")
    network = VQGANNetwork(SHAPE)
    network.load_state_dict({n: t for n, t in released.items() if not n.startswith("loss.")})
    images = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    vectors = network.vectors(images.permute(0, 3, 1, 2) / 255)
    assert torch.equal(tokenizer.encode(images), network.quantize(vectors).ids.flatten(1))
    assert "parameters from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensors: tensors.pop("quantize.embedding.weight"), "it is no released VQGAN"),
        (
            lambda tensors: tensors.pop("decoder.conv_in.bias"),
            "decoder.conv_in.bias has shape None",
        ),
        (lambda tensors: tensors.pop("quant_conv.weight"), "lacks tensors of a VQGAN"),
    ],
)
def test_what_is_no_vqgan(released, tmp_path, capsys, spoil, message):
    spoil(released)
    save_file(released, tmp_path / "a.safetensors")
    assert main(["import", "vqgan", str(tmp_path / "a.safetensors"), str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_would_have_to_be_unpickled(tmp_path, capsys):
    torch.save({"state_dict": {}, "callbacks": VQGANShape}, tmp_path / "last.ckpt")
    assert main(["import", "vqgan", str(tmp_path / "last.ckpt"), str(tmp_path / "run")]) == 2
    assert "holds more than tensors" in capsys.readouterr().err
