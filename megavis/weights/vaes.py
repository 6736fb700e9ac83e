"""Convert GIVT's released VAEs, of images and of label maps, and infer their config.

Those of images are convolutional networks (appendix C.2). Those of label maps are Transformers
(section 4.2), with blocks that are named `encoder/encoderblock_3/...`, or stacked on axis 0 of
`encoder/encoderblock/...`; likewise those of `decoder/`.

Legend: C one-hot channels of a pixel, h hidden size, p side of a patch in pixels.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.papers.vae.config import LabelMapVAEConfig, VAEConfig
from megavis.tokenizers.shapes import VAEShape
from megavis.weights.flax_layers import (
    Arrays,
    ReleasedArrays,
    dense,
    encoder_block_weights,
    norm,
    plain,
    read_arrays,
)
from megavis.weights.released import ReleasedRun


def read_vae(args: argparse.Namespace) -> ReleasedRun:
    """Convert a VAE, without its discriminator, which was not released.

    Raises:
        UserError: the file is not such a checkpoint.
    """
    arrays = read_arrays(args.source)
    shape = vae_shape(arrays)
    paper = VAEConfig(
        latent_channels=shape.latent_channels,
        filters=shape.filters,
        multipliers=shape.multipliers,
        blocks_per_level=shape.blocks_per_level,
        perceptual_weight=0.0,
        adversarial_weight=0.0,
        **({} if args.beta is None else {"beta": args.beta}),
    )
    weights = {f"vae.network.{name}": tensor for name, tensor in vae_weights(arrays).items()}
    return ReleasedRun(paper, weights, image_size=args.image_size)


def vae_weights(released: Arrays) -> dict[str, Tensor]:
    """Rename a VAE's arrays to those of `VAENetwork`, preferring moving averages."""
    arrays = _vae_arrays(released)
    shape = vae_shape(arrays)
    names = dict(_vae_layers(shape))
    renamed = {}
    for name, array in arrays.items():
        layer, _, part = name.rpartition("/")
        if layer not in names:
            raise UserError(f"{name} is not an array of a released VAE")
        renamed[f"{names[layer]}.{'bias' if part == 'bias' else 'weight'}"] = plain(array)
    return renamed


def vae_shape(released: Arrays) -> VAEShape:
    """Infer the sizes of a VAE from its arrays.

    Raises:
        UserError: the arrays are not those of a VAE.
    """
    arrays = _vae_arrays(released)
    try:
        filters = arrays["cnn_encoder/Conv_0/kernel"].shape[-1]
        latent_channels = arrays["cnn_decoder/Conv_0/kernel"].shape[-2]
    except KeyError as error:
        raise UserError(f"the file has no {error.args[0]}; is it a released VAE?") from None
    num_levels = sum(bool(re.fullmatch(r"cnn_decoder/Conv_\d+/kernel", n)) for n in arrays) - 1
    pattern = r"cnn_encoder/ResBlock_\d+/Conv_0/kernel"
    num_blocks = sum(bool(re.fullmatch(pattern, name)) for name in arrays)
    per_level = num_blocks // (num_levels + 1)
    firsts = (f"cnn_encoder/ResBlock_{level * per_level}" for level in range(num_levels))
    widths = [arrays[f"{first}/Conv_1/kernel"].shape[-1] for first in firsts]
    return VAEShape(
        latent_channels=latent_channels,
        filters=filters,
        multipliers=tuple(width // filters for width in widths),
        blocks_per_level=per_level,
    )


def _vae_arrays(released: Arrays) -> dict[str, np.ndarray]:
    for prefix in ("ema_params/", "g_params/"):
        found = {f"cnn_{n.removeprefix(prefix)}": a for n, a in released.items() if prefix in n}
        if found:
            return found
    return dict(released)


def _vae_layers(shape: VAEShape) -> Iterator[tuple[str, str]]:
    """Yield the released name and megavis' name of every layer with parameters."""
    count, levels = shape.blocks_per_level, len(shape.multipliers)
    level_blocks = [f"levels.{level}.{i}" for level in range(levels) for i in range(count)]
    middle_blocks = [f"middle.{i}" for i in range(count)]
    enlargers = [f"enlargers.{i}" for i in range(levels - 1)]
    for part, blocks, convolutions in (
        ("encoder", level_blocks + middle_blocks, ["conv_in", "conv_out"]),
        ("decoder", middle_blocks + level_blocks, ["conv_in", *enlargers, "conv_out"]),
    ):
        for number, name in enumerate(convolutions):
            yield f"cnn_{part}/Conv_{number}", f"{part}.{name}"
        yield f"cnn_{part}/GroupNorm_0", f"{part}.norm"
        for number, name in enumerate(blocks):
            old, new = f"cnn_{part}/ResBlock_{number}", f"{part}.{name}"
            for i in (0, 1):
                yield f"{old}/GroupNorm_{i}", f"{new}.norm_{i}"
                yield f"{old}/Conv_{i}", f"{new}.conv_{i}"
            yield f"{old}/Conv_2", f"{new}.shortcut"


def read_label_map_vae(args: argparse.Namespace) -> ReleasedRun:
    """Convert a VAE of panoptic maps or depths.

    Raises:
        UserError: the file is not such a checkpoint, or is not of the requested kind.
    """
    released = ReleasedLabelMapVAE(read_arrays(args.source))
    paper = released.objective(
        target=args.target, semantic_channels=args.semantic_channels, num_latents=args.latents
    )
    if args.beta is not None:
        paper = paper.model_copy(update={"beta": args.beta})
    return ReleasedRun(
        paper,
        released.weights(),
        image_size=released.image_size,
        sections={"model": released.model()},
    )


@dataclass(frozen=True)
class ReleasedLabelMapVAE(ReleasedArrays):
    """A released VAE of label maps."""

    kind = "VAE of label maps"

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return self.array("embedding/kernel").shape[0]

    @property
    def image_size(self) -> int:
        """Side of a map in pixels."""
        return math.isqrt(self.array("pos_embedding_encoder").shape[1]) * self.patch_size

    def objective(
        self, *, target: str, semantic_channels: int, num_latents: int
    ) -> LabelMapVAEConfig:
        """Infer the `objective` section.

        Args:
            target: `panoptic` or `depth`.
            semantic_channels: of the C channels of panoptic maps, those for classes and void.
            num_latents: latents of a map, on which no array depends.

        Raises:
            UserError: the arrays are those of another model, or do not have such a target.
        """
        channels, side = self.array("embedding/kernel").shape[2], math.isqrt(num_latents)
        if side**2 != num_latents or self.image_size % side:
            raise UserError(
                f"--latents: {num_latents} latents do not tile a square of {self.image_size} pixels"
            )
        keys: dict[str, Any] = {"target": target, "depth_bins": channels, "beta": 2e-4}
        if target == "panoptic":
            rest = channels - semantic_channels
            if rest < 2:
                raise UserError(
                    f"--semantic-channels: the file has {channels} channels for classes and"
                    f" segments, not over {semantic_channels}; is it a VAE of depths"
                    " (--target depth)?"
                )
            keys = {"semantic_channels": semantic_channels, "instance_channels": rest}
        return LabelMapVAEConfig(
            **keys,
            patch_size=self.patch_size,
            downsampling=self.image_size // side,
            latent_channels=self.array("decoder_stem/kernel").shape[0],
            decoder_layers=len(self.blocks("decoder/encoderblock")),
        )

    def model(self) -> ModelConfig:
        """Infer the `model` section, of the encoder."""
        blocks = self.blocks("encoder/encoderblock")
        width, heads, _ = blocks[0]["MultiHeadDotProductAttention_0/query/kernel"].shape
        return ModelConfig(
            num_layers=len(blocks),
            hidden_size=width,
            num_attention_heads=heads,
            ffn_hidden_size=blocks[0]["MlpBlock_0/Dense_0/kernel"].shape[1],
            normalization="layer_norm",
            norm_epsilon=1e-6,
            activation="gelu_tanh",
            add_bias=True,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return float32 tensors under megavis' names.

        Raises:
            UserError: an array is missing.
        """
        return {name: tensor.float().contiguous() for name, tensor in self._named()}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield "embedding.table", self.tensor("embedding/kernel").flatten(0, 2)
        yield "embedding.bias", self.tensor("embedding/bias")
        yield "embedding.positions.weight", self.tensor("pos_embedding_encoder")[0]
        yield from self._block_weights("encoder", "blocks")
        yield from norm("bottleneck.norm", self.arrays, "encoder/encoder_norm/")
        yield from dense("bottleneck.moments", self.arrays, "encoder_head/")
        yield from dense("bottleneck.linear", self.arrays, "decoder_stem/")
        yield "bottleneck.positions.weight", self.tensor("pos_embedding_decoder")[0]
        yield from self._block_weights("decoder", "decoder")
        yield from norm("head.norm", self.arrays, "decoder/encoder_norm/")
        yield from dense("head.linear", self.arrays, "decoder_head/")

    def _block_weights(self, part: str, own: str) -> Iterator[tuple[str, Tensor]]:
        for number, block in enumerate(self.blocks(f"{part}/encoderblock")):
            for name, tensor in encoder_block_weights(block):
                yield f"{own}.{number}.{name}", tensor
