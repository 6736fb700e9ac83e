"""Training of the VQGAN whose ids GVP reads and predicts.

"Taming Transformers for High-Resolution Image Synthesis" (2021), section 3.1: reconstruction,
perceptual and adversarial loss (`autoencoder.py`), and the codebook and commitment losses of
"Neural Discrete Representation Learning" (2017), equation 3.

Legend: b images, H and W pixels, h and w sides of the grid of ids, K entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megavis.composition.autoencoder import AutoencoderObjective, State
from megavis.model.parameters import ParamGroupOptions, add_options, set_decay
from megavis.papers.vqgan.config import VQGANConfig
from megavis.tokenizers.shapes import VQGANShape
from megavis.tokenizers.vqgan import Codebook, VQGANNetwork, usage


class VQGANObjective(AutoencoderObjective):
    """Reconstruct images from ids."""

    config_type = VQGANConfig
    paper: VQGANConfig

    def build_autoencoder(self) -> nn.Module:
        """Build the VQGAN, whose codebook may have its own learning rate."""
        layer, rate = VQGANLayer(self.paper.shape), self.paper.codebook_learning_rate
        if rate is not None:
            options = ParamGroupOptions(rate / self.config.optimizer.learning_rate)
            add_options(layer.network.quantize.parameters(), options)
        return layer

    def inputs_from(
        self, inputs: Any, *, sample_index: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Return pixels of images `[b, H, W, 3]`, uint8 or floats in [0, 1]."""
        self.check_options(options)
        return (self.pixels_from(inputs),)

    def own_terms(self, between: State) -> Mapping[str, Tensor]:
        """Return the three losses, and usage statistics of the codebook.

        `codebook_use` is the share of entries used by this batch; `codebook_perplexity` is
        exp(entropy) of the assignments, K if all entries are used equally often.
        """
        codebook, commitment, revival, ids = between
        counts = usage(ids, self.paper.codebook_size)
        shares = counts / counts.sum()
        entropy = torch.special.entr(shares).sum()
        return {
            "codebook": codebook,
            "commitment": commitment,
            "revival": revival,
            "codebook_use": (counts > 0).float().mean(),
            "codebook_perplexity": entropy.exp(),
        }

    def own_loss(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of the three losses."""
        return (
            self.paper.codebook_weight * terms["codebook"]
            + self.paper.commitment_weight * terms["commitment"]
            + self.paper.revival_weight * terms["revival"]
        )

    def outputs(self, predictions: State) -> Tensor:
        """Return ids int64 `[b, h · w]` in raster order."""
        return predictions[5].flatten(1)

    def plain_network(self, pixels: Tensor) -> Tensor:
        """Run the network without quantization, which adds one matrix product."""
        network = VQGANNetwork(self.paper.shape)
        return network.decode(network.vectors(pixels))


class VQGANLayer(nn.Module):
    """The VQGAN as the first layer."""

    def __init__(self, shape: VQGANShape) -> None:
        super().__init__()
        self.network = VQGANNetwork(shape)
        set_decay(self.network.quantize.embedding.weight, "never")

    def forward(self, inputs: State) -> State:
        """Map pixels `[b, 3, H, W]` in [0, 1].

        Returns:
            Pixels; reconstruction; the scalar codebook, commitment and revival losses; ids int64
            `[b, h, w]`.
        """
        (pixels,) = inputs
        pixels = pixels.to(self.network.quantize.embedding.weight.dtype)
        made, vectors, quantized = self.network(pixels)
        vectors, codes = vectors.float(), quantized.codes.float()
        pulls = (
            (codes - vectors.detach()).square().mean(),
            (codes.detach() - vectors).square().mean(),
            _revival(self.network.quantize, vectors.detach(), quantized.ids),
        )
        return pixels, made, *pulls, quantized.ids


def _revival(book: Codebook, vectors: Tensor, ids: Tensor) -> Tensor:
    """Return the mean squared distance of unused entries to vectors, over all entries.

    Each entry is paired with a vector, spread evenly over the batch: deterministic, and without
    synchronizing with the device.
    """
    entries = book.entries.float()
    flat = vectors.permute(0, 2, 3, 1).flatten(0, 2)
    places = torch.arange(len(entries), device=flat.device) * len(flat) // len(entries)
    unused = usage(ids, len(entries)) == 0
    return ((entries - flat[places]).square().mean(1) * unused).mean()
