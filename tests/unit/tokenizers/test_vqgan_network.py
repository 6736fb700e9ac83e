"""VQGAN against Janus's VQ-VAE in transformers, which has the released network's layers."""

import pytest
import torch
from torch import nn

from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan import Codebook, VQGANNetwork

pytestmark = pytest.mark.once

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
    from transformers.models.janus.configuration_janus import JanusVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAE

    torch.manual_seed(0)
    config = JanusVQVAEConfig(
        embed_dim=SHAPE.code_size,
        num_embeddings=SHAPE.codebook_size,
        latent_channels=SHAPE.latent_channels,
        base_channels=SHAPE.filters,
        channel_multiplier=list(SHAPE.multipliers),
        num_res_blocks=SHAPE.blocks_per_level,
        double_latent=False,
        num_patches=4,
    )
    theirs = JanusVQVAE(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.1)
    ours = VQGANNetwork(SHAPE)
    ours.load_state_dict({released_name(k): v for k, v in theirs.state_dict().items()})
    return ours, theirs


def released_name(name):
    """Map Janus's decoder levels (coarsest first) to the released VQGAN's (finest first)."""
    if not name.startswith("decoder.up."):
        return name
    _, _, level, rest = name.split(".", 3)
    return f"decoder.up.{len(SHAPE.multipliers) - 1 - int(level)}.{rest}"


def test_encoder_and_decoder_match_janus(networks):
    ours, theirs = networks
    pixels = torch.rand(2, 3, 16, 16)
    vectors = ours.vectors(pixels)
    expected = theirs.quant_conv(theirs.encoder(2 * pixels - 1))
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)
    codes = torch.randn(2, SHAPE.code_size, 4, 4)
    expected = (theirs.decoder(theirs.post_quant_conv(codes)) + 1) / 2
    torch.testing.assert_close(ours.decode(codes), expected, rtol=1e-4, atol=1e-5)


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
