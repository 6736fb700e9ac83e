"""Janus's VQ-VAE in transformers, as a reference for VQGANs.

It has the layers of "Taming Transformers" under the same names but for the decoder's levels, which
it numbers from the coarsest. LlamaGen's tokenizer, from which it descends, is that network.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.janus.configuration_janus import JanusVQVAEConfig
from transformers.models.janus.modeling_janus import JanusVQVAE

from megavis.tokenizers.shapes import VQGANShape


def janus_network(shape: VQGANShape, *, side: int) -> JanusVQVAE:
    """Build a network of these sizes, for images of `side` squared ids, with random weights."""
    config = JanusVQVAEConfig(
        embed_dim=shape.code_size,
        num_embeddings=shape.codebook_size,
        latent_channels=shape.latent_channels,
        base_channels=shape.filters,
        channel_multiplier=list(shape.multipliers),
        num_res_blocks=shape.blocks_per_level,
        double_latent=False,
        num_patches=side,
    )
    torch.manual_seed(0)
    network = JanusVQVAE(config).eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    return network
