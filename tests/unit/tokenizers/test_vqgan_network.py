"""VQGAN against Janus's VQ-VAE in transformers, which has the released network's layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from janus_network import janus_network
from torch import nn

from megavis.config.load import load_config
from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan import Codebook, VQGANNetwork

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"

SHAPE = VQGANShape(
    codebook_size=20,
    code_size=6,
    filters=32,
    multipliers=(1, 2, 2),
    blocks_per_level=2,
    latent_channels=8,
)


@pytest.fixture(scope="module")
def networks():
    theirs = janus_network(SHAPE, side=4)
    ours = VQGANNetwork(SHAPE)
    ours.load_state_dict({released_name(k, SHAPE): v for k, v in theirs.state_dict().items()})
    return ours, theirs


def released_name(name, shape):
    """Map Janus's decoder levels (coarsest first) to the released VQGAN's (finest first)."""
    if not name.startswith("decoder.up."):
        return name
    _, _, level, rest = name.split(".", 3)
    return f"decoder.up.{len(shape.multipliers) - 1 - int(level)}.{rest}"


def test_preset_of_llamagens_tokenizer():
    """Janus's default config has the sizes of LlamaGen's `vq_ds16_c2i.pt`."""
    from transformers.models.janus.configuration_janus import JanusVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAE

    shape = load_config(PRESETS / "randar/vqgan.yaml").config.objective.shape
    assert shape.normalize_codes
    with torch.device("meta"):
        ours, theirs = VQGANNetwork(shape), JanusVQVAE(JanusVQVAEConfig())
    theirs = {
        released_name(name, shape): tensor.shape for name, tensor in theirs.state_dict().items()
    }
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == theirs


def test_encoder_and_decoder_match_janus(networks):
    ours, theirs = networks
    pixels = torch.rand(2, 3, 16, 16)
    vectors = ours.vectors(pixels)
    expected = theirs.quant_conv(theirs.encoder(2 * pixels - 1))
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)
    codes = torch.randn(2, SHAPE.code_size, 4, 4)
    expected = (theirs.decoder(theirs.post_quant_conv(codes)) + 1) / 2
    torch.testing.assert_close(ours.decode(codes), expected, rtol=1e-4, atol=1e-5)


def test_normalized_codes():
    """Entries and vectors have length 1: the entry of an id has the largest cosine similarity."""
    torch.manual_seed(1)
    network = VQGANNetwork(replace(SHAPE, normalize_codes=True))
    torch.testing.assert_close(network.quantize.embedding.weight.norm(dim=1), torch.ones(20))
    nn.init.normal_(network.quantize.embedding.weight)
    pixels = torch.rand(2, 3, 16, 16)
    raw = network.quant_conv(network.encoder(2 * pixels - 1))
    _, vectors, quantized = network(pixels)
    torch.testing.assert_close(vectors, raw / raw.norm(dim=1, keepdim=True))
    entries = network.quantize.embedding.weight
    similarity = F.cosine_similarity(raw[:, None], entries[None, :, :, None, None], dim=2)
    assert torch.equal(quantized.ids, similarity.argmax(1))
    assert len(quantized.ids.unique()) > 3
    codes = (entries / entries.norm(dim=1, keepdim=True))[quantized.ids].permute(0, 3, 1, 2)
    torch.testing.assert_close(quantized.codes, codes)
    (gradient,) = torch.autograd.grad(quantized.codes.sum(), entries)
    # Only the direction of a weight matters.
    torch.testing.assert_close((gradient * entries).sum(1), torch.zeros(20), atol=1e-5, rtol=0)


def test_quantization_chooses_the_nearest_entry():
    torch.manual_seed(1)
    book = Codebook(50, 3)
    nn.init.normal_(book.embedding.weight)
    vectors = torch.randn(2, 3, 4, 5)
    quantized = book(vectors)
    for b in range(2):
        for i in range(4):
            for j in range(5):
                distance = (book.embedding.weight - vectors[b, :, i, j]).norm(dim=1)
                assert quantized.ids[b, i, j] == distance.argmin()
                entry = book.embedding.weight[distance.argmin()]
                assert torch.equal(quantized.codes[b, :, i, j], entry)


def test_gradient_is_straight_through(networks):
    """The encoder receives the decoder's gradient at the codes; the codebook receives none."""
    ours, _ = networks
    pixels = torch.rand(1, 3, 16, 16)
    out, vectors, quantized = ours(pixels)
    torch.testing.assert_close(out, ours.decode(quantized.codes), rtol=1e-4, atol=1e-5)
    (passed,) = torch.autograd.grad(out.square().sum(), vectors, retain_graph=True)
    codes = quantized.codes.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(ours.decode(codes).square().sum(), codes)
    torch.testing.assert_close(passed, wanted, rtol=1e-3, atol=1e-4)
    book = ours.quantize.embedding.weight
    assert torch.autograd.grad(out.sum(), book, allow_unused=True) == (None,)
