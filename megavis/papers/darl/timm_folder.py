"""Convert Vision Transformers of `timm` to DARL models with full attention, and run the former.

With full attention, DARL's start token is a class token, and its patch embedding and blocks are
those of a ViT: such a run has timm's features, and can be fine-tuned like any other.

Legend: b images, T patches, p side of a patch, h hidden size, c classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.vit_blocks import TIMM, block_from, run_block
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, for_other_pixels

EPSILON = 1e-6
"""Epsilon of the norms in timm's ViTs."""
_USUAL_HEAD = 64


@dataclass(frozen=True)
class TimmViT:
    """A ViT's tensors under timm's names, and settings that they do not determine.

    Attributes:
        tensors: float32 tensors.
        num_heads: attention heads.
        mean: mean of each channel in [0, 1], for standardising the inputs.
        deviation: standard deviation of each channel.
        epsilon: epsilon of the norms.
    """

    tensors: Mapping[str, Tensor]
    num_heads: int
    mean: Sequence[float] = CHANNEL_MEAN
    deviation: Sequence[float] = CHANNEL_DEVIATION
    epsilon: float = EPSILON

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return sum(re.fullmatch(r"blocks\.\d+\.norm1\.weight", n) is not None for n in self.tensors)

    @property
    def hidden_size(self) -> int:
        """Width h."""
        return self.tensors["norm.weight"].shape[0]

    @property
    def mlp_size(self) -> int:
        """Width of the MLP."""
        return self.tensors["blocks.0.mlp.fc1.weight"].shape[0]

    @property
    def patch_size(self) -> int:
        """Side p."""
        return self.tensors["patch_embed.proj.weight"].shape[-1]

    @property
    def image_size(self) -> int:
        """Side of the images in pixels."""
        return self.patch_size * round((self.tensors["pos_embed"].shape[1] - 1) ** 0.5)

    @property
    def num_classes(self) -> int:
        """Classes c; 0 if the network has no classifier."""
        head = self.tensors.get("head.weight")
        return 0 if head is None else head.shape[0]


def read_timm_folder(folder: Path, *, num_heads: int | None = None) -> TimmViT:
    """Read `model.safetensors`, and `config.json` if there is one.

    Args:
        folder: a folder written by timm's `save_for_hf`.
        num_heads: attention heads; by default width / 64, as in timm's standard ViTs except the
            huge ones (16).

    Raises:
        UserError: the folder does not contain a plain ViT with a class token.
    """
    weights, settings = folder / "model.safetensors", folder / "config.json"
    if not weights.exists():
        raise UserError(f"{weights}: missing; save the model with timm.models.save_for_hf")
    tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
    _check(tensors)
    pretrained: dict[str, Any] = {}
    if settings.exists():
        pretrained = json.loads(settings.read_text(encoding="utf-8")).get("pretrained_cfg", {})
    width = tensors["norm.weight"].shape[0]
    heads = num_heads or max(1, width // _USUAL_HEAD)
    if width % heads:
        raise UserError(f"a width of {width} is not divisible by {heads} heads; pass --heads")
    mean, deviation = pretrained.get("mean", CHANNEL_MEAN), pretrained.get("std", CHANNEL_DEVIATION)
    return TimmViT(tensors, heads, mean, deviation)


def _check(tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError for tensors that are missing or do not belong to a plain ViT."""
    blocks = {int(m.group(1)) for name in tensors if (m := re.match(r"blocks\.(\d+)\.", name))}
    layers = ["patch_embed.proj", "norm"]
    for block in range(max(blocks, default=0) + 1):
        layers += [f"blocks.{block}.{part}" for part in TIMM.all]
    wanted = ["cls_token", "pos_embed", *_parameters(*layers)]
    known = {*wanted, *_parameters("head")}
    for name in tensors:
        if name not in known:
            raise UserError(
                f"the folder's {name} does not belong to a plain ViT with a class token"
            )
    for name in wanted:
        if name not in tensors:
            raise UserError(f"the folder has no {name}; is it a plain ViT with a class token?")
    cells = tensors["pos_embed"].shape[1] - 1
    if round(cells**0.5) ** 2 != cells:
        raise UserError(f"{cells} positions after that of the class token are not a square grid")


def _parameters(*layers: str) -> list[str]:
    return [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def from_timm(model: TimmViT) -> dict[str, Tensor]:
    """Convert to megavis' names.

    The network's mean and standard deviation of pixels are folded into the patch embedding, since
    megavis always standardises by ImageNet's.

    Returns:
        float32 tensors under the names of a fine-tuning run of DARL with learned positions; the
        classifier is zero if timm's network has none.
    """
    tensors, width = model.tensors, model.hidden_size
    kernel = tensors["patch_embed.proj.weight"].permute(0, 2, 3, 1).flatten(1)
    matrix, bias = for_other_pixels(
        kernel,
        tensors["patch_embed.proj.bias"],
        (model.mean, model.deviation),
        (CHANNEL_MEAN, CHANNEL_DEVIATION),
    )
    positions = tensors["pos_embed"][0]
    whole = {
        "embedding.patches.weight": matrix,
        "embedding.patches.bias": bias,
        "embedding.start": tensors["cls_token"][0, 0] + positions[0],
        "embedding.positions.weight": positions[1:],
        "head.norm.weight": tensors["norm.weight"],
        "head.norm.bias": tensors["norm.bias"],
        "head.classifier.linear.weight": tensors.get("head.weight", torch.zeros(2, width)),
        "head.classifier.linear.bias": tensors.get("head.bias", torch.zeros(2)),
    }
    for layer in range(model.num_layers):
        prefix = f"blocks.{layer}."
        block = block_from(tensors, prefix, TIMM, num_heads=model.num_heads)
        whole |= {f"{prefix}{name}": tensor for name, tensor in block.items()}
    return {name: tensor.float().contiguous() for name, tensor in whole.items()}


def timm_features(model: TimmViT, images: Tensor) -> Tensor:
    """Run timm's network, independently of megavis' layers, to check a conversion.

    Args:
        model: the network.
        images: uint8 `[b, H, W, 3]`.

    Returns:
        The final norm's output, float32 `[b, 1 + T, h]`, the class token first.
    """
    tensors, heads = model.tensors, model.num_heads
    mean, deviation = torch.tensor(model.mean), torch.tensor(model.deviation)
    pixels = ((images / 255.0 - mean) / deviation).permute(0, 3, 1, 2)
    patches = F.conv2d(pixels, *_pair(tensors, "patch_embed.proj"), stride=model.patch_size)
    x = torch.cat([tensors["cls_token"].expand(len(images), -1, -1), patches.flatten(2).mT], 1)
    x = x + tensors["pos_embed"]
    for layer in range(model.num_layers):
        prefix, epsilon = f"blocks.{layer}.", model.epsilon
        x = run_block(x, tensors, prefix, TIMM, num_heads=heads, epsilon=epsilon)
    return F.layer_norm(x, (model.hidden_size,), *_pair(tensors, "norm"), model.epsilon)


def _pair(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]
