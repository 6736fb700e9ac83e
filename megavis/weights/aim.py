"""Released weights of AIM, as a run with an attentive probe.

"Scalable Pre-training of Large Autoregressive Image Models": a folder of the Hub
(`AIMForImageClassification`: `model.safetensors` and `config.json`), or a file of the trunk's
weights, with or without a probe's. The head that predicts pixels was not released.

Legend: h width of the trunk.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import FinetuneConfig, ModelConfig
from megavis.papers.aim.config import AIMConfig
from megavis.tokenizers.network_tokenizer import read_weights_file
from megavis.weights.released import (
    SETTINGS,
    Released,
    ReleasedTensors,
    check_sizes,
    read_hub_weights,
    read_json,
)
from megavis.weights.tables import (
    TOKEN,
    Layout,
    Row,
    Table,
    count,
    joined_heads,
    layer,
    patches,
)

MODEL = "AIM"
_PATCHES = "preprocessor.patchifier"
_BLOCKS = "trunk.blocks."
_HEAD_SIZE, _IMAGE_SIZE, _PROBED = 128, 224, 6
"""Width of an attention head, side of the images and averaged layers, in all released networks."""
# Our classifier has a bias, theirs has none.
_WITHOUT_BIAS = Layout(
    lambda weight: (weight, weight.new_zeros(len(weight))), lambda weight, bias: weight
)


def aim_table(*, num_layers: int, num_heads: int, patch_size: int, probed: int) -> Table:
    """Map the tensors of a run with a probe to the released names.

    Args:
        num_layers: blocks of the trunk.
        num_heads: attention heads.
        patch_size: side of a patch in pixels.
        probed: the last block, counted from 1, whose output is probed; blocks above it are dropped.
    """
    top = "head" if probed == num_layers else f"blocks.{probed}"
    norm, theirs = f"{top}.norm", "trunk.post_trunk_norm"
    if probed < num_layers:
        norm, theirs = f"{top}.input_layernorm", f"{_BLOCKS}{probed}.norm_1"
    probe = f"{top}.classifier"
    table = [
        Row("embedding.content.weight", f"{_PATCHES}.proj.weight", patches(patch_size)),
        Row("embedding.content.bias", f"{_PATCHES}.proj.bias"),
        *layer("embedding.content.norm", f"{_PATCHES}.norm"),
        *layer(norm, theirs),
        Row(f"{probe}.pool.query", "head.cls_token", TOKEN),
        Row(f"{probe}.pool.key.weight", "head.k.weight"),
        Row(f"{probe}.pool.value.weight", "head.v.weight"),
        Row(f"{probe}.standardize.mean", "head.bn.running_mean"),
        Row(f"{probe}.standardize.variance", "head.bn.running_var"),
        Row(
            (f"{probe}.linear.weight", f"{probe}.linear.bias"), "head.linear.weight", _WITHOUT_BIAS
        ),
    ]
    for number in range(probed):
        ours, block = f"blocks.{number}", f"{_BLOCKS}{number}"
        table += [
            Row(
                f"{ours}.self_attention.linear_qkv.weight",
                f"{block}.attn.qkv.weight",
                joined_heads(num_heads, parts=1),
            ),
            Row(f"{ours}.self_attention.linear_proj.weight", f"{block}.attn.proj.weight"),
            Row(f"{ours}.mlp.linear_fc1.weight", f"{block}.mlp.fc1.weight"),
            Row(f"{ours}.mlp.linear_fc2.weight", f"{block}.mlp.fc2.weight"),
            *layer(f"{ours}.input_layernorm", f"{block}.norm_1"),
            *layer(f"{ours}.pre_mlp_layernorm", f"{block}.norm_2"),
        ]
    return table


def read_aim(args: argparse.Namespace) -> Released:
    """Read a folder of the Hub, or a file of weights.

    Sizes are inferred from the tensors. `config.json`, if there is one, gives `num_heads` (default:
    width / 128), `img_size` (default: 224) and `probe_layers` (default: the last six). If the file
    has no head, the probe is zero, to be trained.

    Raises:
        UserError: it contains no such network.
    """
    tensors, settings = _read(args.source)
    width = len(tensors[f"{_PATCHES}.proj.bias"])
    patch_size = tensors[f"{_PATCHES}.proj.weight"].shape[-1]
    num_layers = count(tensors, _BLOCKS)
    num_heads = settings.get("num_heads", max(1, width // _HEAD_SIZE))
    if width % num_heads:
        raise UserError(f"{args.source}: width {width} is not divisible by {num_heads} heads")
    layers: Any = min(_PROBED, num_layers)
    if "head.linear.weight" not in tensors:
        tensors |= _blank_head(width)
    else:
        layers = settings.get("probe_layers", layers)
    probed = _probed(args.source, layers, num_layers)
    return Released(
        AIMConfig(patch_size=patch_size),
        tensors,
        aim_table(
            num_layers=num_layers, num_heads=num_heads, patch_size=patch_size, probed=probed.stop
        ),
        image_size=settings.get("img_size", _IMAGE_SIZE),
        sections={
            "model": aim_model(
                num_layers, width, num_heads, len(tensors[f"{_BLOCKS}0.mlp.fc1.weight"])
            ),
            "finetune": FinetuneConfig(
                num_classes=len(tensors["head.linear.weight"]),
                visibility="full",
                read_out="attention",
                layer=probed.stop,
                average=len(probed),
                linear_evaluation=True,
            ),
        },
        # The batch norm's counter, and everything above the probed blocks.
        ignored=_above(probed.stop, num_layers),
        validates=True,
    )


def aim_model(num_layers: int, width: int, num_heads: int, mlp: int) -> ModelConfig:
    """Return the section `model` of a trunk; features are the blocks' outputs."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=width,
        num_attention_heads=num_heads,
        ffn_hidden_size=None if mlp == 4 * width else mlp,
        normalization="layer_norm",
        norm_epsilon=1e-6,
        activation="gelu",
        features="blocks",
    )


def _read(source: Path) -> tuple[ReleasedTensors, Mapping[str, Any]]:
    settings: Mapping[str, Any] = {}
    if source.is_dir():
        path, tensors = source / SETTINGS, read_hub_weights(source)
        if path.exists():
            settings = read_json(path)
            # The Hub's mixin may write the constructor's argument under its name.
            inner = settings.get("config", settings)
            settings = inner if isinstance(inner, dict) else settings
            sizes = {"num_heads", "img_size"} & settings.keys()
            check_sizes(path, settings, *sorted(sizes))
    else:
        tensors = read_weights_file(source)
    floats = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    return ReleasedTensors(floats, source=source, model=MODEL), settings


def _probed(source: Path, layers: Any, num_layers: int) -> range:
    """Return the probed blocks, counted from 0; raise UserError unless they are adjacent."""
    if isinstance(layers, int) and 0 < layers <= num_layers:
        return range(num_layers - layers, num_layers)
    found: Sequence[Any] = layers if isinstance(layers, list | tuple) else ()
    if found and isinstance(found[0], int) and 0 <= found[0] <= num_layers - len(found):
        adjacent = range(found[0], found[0] + len(found))
        if list(found) == list(adjacent):
            return adjacent
    raise UserError(
        f"{source / SETTINGS}: probe_layers is {layers!r}, neither a number of last blocks nor"
        f" adjacent blocks of {num_layers}"
    )


def _blank_head(width: int) -> dict[str, Tensor]:
    """Return the tensors of a head of two classes, all of whose weights are zero."""
    square, ones = torch.zeros(width, width), torch.ones(width)
    return {
        "head.cls_token": torch.zeros(1, 1, width),
        "head.k.weight": square,
        "head.v.weight": square.clone(),
        "head.linear.weight": torch.zeros(2, width),
        "head.bn.running_mean": torch.zeros(width),
        "head.bn.running_var": ones,
    }


def _above(probed: int, num_layers: int) -> str:
    """Return a regular expression of the released names that a probe does not use."""
    names = [r"head\.bn\.num_batches_tracked$"]
    if probed < num_layers:
        names.append(r"trunk\.post_trunk_norm\.")
        # The norm of the first block above is kept: features are read there.
        names.append(rf"trunk\.blocks\.{probed}\.(?!norm_1\.)")
        names += [rf"trunk\.blocks\.{number}\." for number in range(probed + 1, num_layers)]
    return "|".join(names)
