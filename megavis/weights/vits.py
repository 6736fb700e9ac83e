"""Vision Transformers of `timm` and `transformers` as DARL models with full attention, and back.

With full attention, DARL's start token is a class token, and its patch embedding and blocks are
those of a ViT: such a run has timm's features, and can be fine-tuned like any other.

Legend: b images, T patches, p side of a patch, h hidden size, c classes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import FinetuneConfig, ModelConfig
from megavis.papers.darl.config import DARLConfig
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, for_other_pixels
from megavis.weights.released import (
    Compared,
    OpenedRun,
    ReleasedRun,
    missing_file,
    random_images,
    read_hub_folder,
    read_json,
    read_tensors,
)
from megavis.weights.vit_blocks import (
    TIMM,
    TRANSFORMERS,
    block_from,
    block_to,
    run_block,
    with_older_names,
)
from megavis.weights.vit_settings import (
    check_depth,
    check_shapes,
    check_vit_settings,
    read_statistics,
    vit_shapes,
)

EPSILON = 1e-6
"""Epsilon of the norms in timm's ViTs."""
_USUAL_HEAD = 64
_OUTER = (
    ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
    ("norm", "layernorm"),
)


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
        raise missing_file(weights, "save the model with timm.models.save_for_hf")
    tensors = {name: tensor.float() for name, tensor in read_tensors(weights).items()}
    _check(tensors)
    pretrained = read_json(settings).get("pretrained_cfg", {}) if settings.exists() else {}
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
        "embedding.content.weight": matrix,
        "embedding.content.bias": bias,
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


def transformers_settings(vit: TimmViT) -> dict[str, Any]:
    """Return the `config.json` of `ViTModel`, or of `ViTForImageClassification`."""
    classes = vit.num_classes
    settings = {
        "architectures": ["ViTForImageClassification" if classes else "ViTModel"],
        "model_type": "vit",
        "hidden_size": vit.hidden_size,
        "num_hidden_layers": vit.num_layers,
        "num_attention_heads": vit.num_heads,
        "intermediate_size": vit.mlp_size,
        "hidden_act": "gelu",
        "layer_norm_eps": vit.epsilon,
        "image_size": vit.image_size,
        "patch_size": vit.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
    }
    if classes:
        names = {index: f"class {index}" for index in range(classes)}
        settings |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    return settings


def to_transformers(vit: TimmViT) -> dict[str, Tensor]:
    """Return the tensors by the names of `transformers`."""
    tensors = vit.tensors
    found = {
        "embeddings.cls_token": tensors["cls_token"],
        "embeddings.position_embeddings": tensors["pos_embed"],
    }
    for kind in ("weight", "bias"):
        found |= {f"{new}.{kind}": tensors[f"{old}.{kind}"] for old, new in _OUTER}
    for layer in range(vit.num_layers):
        ours = block_from(tensors, f"blocks.{layer}.", TIMM, num_heads=vit.num_heads)
        block = block_to(ours, "", TRANSFORMERS, num_heads=vit.num_heads)
        found |= {f"encoder.layer.{layer}.{name}": tensor for name, tensor in block.items()}
    if vit.num_classes:
        found = {f"vit.{name}": tensor for name, tensor in found.items()}
        found |= {f"classifier.{kind}": tensors[f"head.{kind}"] for kind in ("weight", "bias")}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def from_transformers(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> TimmViT:
    """Undo `to_transformers`.

    Raises:
        UserError: a tensor is missing.
    """
    inner = {name.removeprefix("vit."): tensor.float() for name, tensor in tensors.items()}
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    try:
        found = {
            "cls_token": inner["embeddings.cls_token"],
            "pos_embed": inner["embeddings.position_embeddings"],
        }
        for kind in ("weight", "bias"):
            found |= {f"{old}.{kind}": inner[f"{new}.{kind}"] for old, new in _OUTER}
        for layer in range(layers):
            ours = block_from(inner, f"encoder.layer.{layer}.", TRANSFORMERS, num_heads=heads)
            block = block_to(ours, "", TIMM, num_heads=heads)
            found |= {f"blocks.{layer}.{name}": tensor for name, tensor in block.items()}
    except KeyError as error:
        raise UserError(f"the folder's weights have no {error.args[0]}; is it a ViT?") from None
    if "classifier.weight" in inner:
        found |= {f"head.{kind}": inner[f"classifier.{kind}"] for kind in ("weight", "bias")}
    return TimmViT(found, heads, epsilon=settings.get("layer_norm_eps", 1e-12))


def read_timm(args: argparse.Namespace) -> ReleasedRun:
    """Convert a folder of timm; raises UserError where it is no plain ViT."""
    return _run_of(read_timm_folder(args.source, num_heads=args.heads))


def read_vit(args: argparse.Namespace) -> ReleasedRun:
    """Convert a ViT folder of transformers; raises UserError where it is none."""
    settings, tensors = read_hub_folder(args.source)
    tensors = with_older_names(tensors)
    _check_folder(args.source, settings, tensors)
    mean, deviation = read_statistics(args.source)
    model = replace(from_transformers(tensors, settings), mean=mean, deviation=deviation)
    return _run_of(model)


def _check_folder(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError if a folder's settings are not those of our layers, or of its weights."""
    check_vit_settings(folder / "config.json", settings)
    prefix = "vit." if any(name.startswith("vit.") for name in tensors) else ""
    shapes = vit_shapes(settings, prefix)
    check_shapes(folder, tensors, shapes, wanted="ViTModel", settings=settings)
    check_depth(folder, tensors, f"{prefix}encoder.layer", settings["num_hidden_layers"])
    classifier = tensors.get("classifier.weight")
    if classifier is not None and len(classifier) < 2:
        raise UserError(f"{folder}: its classifier has one output; at least two classes are needed")


def _run_of(model: TimmViT) -> ReleasedRun:
    return ReleasedRun(
        DARLConfig(patch_size=model.patch_size),
        from_timm(model),
        image_size=model.image_size,
        sections={
            "model": ModelConfig(
                num_layers=model.num_layers,
                hidden_size=model.hidden_size,
                num_attention_heads=model.num_heads,
                ffn_hidden_size=model.mlp_size,
                normalization="layer_norm",
                norm_epsilon=model.epsilon,
                activation="gelu",
                add_bias=True,
                positions="learned",
            ),
            "finetune": FinetuneConfig(
                num_classes=max(2, model.num_classes), visibility="full", read_out="first"
            ),
        },
        validates=True,
        compare=partial(_compare, model),
        compared="features and class logits",
    )


def _compare(model: TimmViT, run: OpenedRun) -> Compared:
    images = random_images(model.image_size)
    theirs = timm_features(model, images)
    yield run.features(images, layer=model.num_layers), theirs.mean(1)
    if model.num_classes:
        logits = theirs[:, 0] @ model.tensors["head.weight"].t() + model.tensors["head.bias"]
        yield run.outputs(images), logits
