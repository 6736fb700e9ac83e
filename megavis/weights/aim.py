"""Released weights of AIM, as a run with an attentive probe.

"Scalable Pre-training of Large Autoregressive Image Models": a folder of the Hub
(`AIMForImageClassification`: `model.safetensors` and `config.json`), or a file of the trunk's
weights, with or without a probe's, which also has files of its own: one for the last six blocks and
one for the best. The head that predicts pixels was not released.

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
_BEST = {
    1536: range(14, 20),
    2048: range(12, 18),
    3072: range(12, 18),
    4096: range(14, 20),
}
"""The blocks that the released probes of the best layers read, by the width of the trunk."""
# Our classifier has a bias, theirs has none.
_WITHOUT_BIAS = Layout(
    lambda weight: (weight, weight.new_zeros(len(weight))), lambda weight, bias: weight
)


def aim_table(*, num_layers: int, num_heads: int, patch_size: int, probed: int) -> Table:
    """Map the tensors of a run with a probe to the released names.

    Args:
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
    width / 128), `img_size` (default: 224) and `probe_layers` (default: the last six). A head from
    a file of its own (`args.head`) takes the place of the one inside, and `args.head_layers` that
    of `probe_layers`. If there is no head, the probe is new, to be trained.

    Raises:
        UserError: it contains no such network, or the layers of a head are not known.
    """
    if args.head is not None and args.head_layers is None:
        raise UserError("--head needs --head-layers: a head's file does not say what it reads")
    tensors, settings = _read(args.source, args.head)
    width = len(tensors[f"{_PATCHES}.proj.bias"])
    patch_size = tensors[f"{_PATCHES}.proj.weight"].shape[-1]
    num_layers = count(tensors, _BLOCKS)
    num_heads = settings.get("num_heads", max(1, width // _HEAD_SIZE))
    if width % num_heads:
        raise UserError(f"{args.source}: width {width} is not divisible by {num_heads} heads")
    layers: Any = args.head_layers
    if layers is None:
        # Those of the trunk's own head, or of a new one.
        has_head = "head.linear.weight" in tensors
        layers = settings.get("probe_layers", "last") if has_head else "last"
    probed = _probed(args, layers, width, num_layers)
    if "head.linear.weight" not in tensors:
        tensors |= _new_head(width)
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
        part=args.head,
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


def _read(source: Path, head: Path | None) -> tuple[ReleasedTensors, Mapping[str, Any]]:
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
    if head is not None:
        tensors = tensors | _read_head(head)
    floats = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    return ReleasedTensors(floats, source=source, model=MODEL), settings


def _read_head(path: Path) -> dict[str, Tensor]:
    tensors = read_weights_file(path)
    others = sorted(name for name in tensors if not name.startswith("head."))
    if others or not tensors:
        text = f"{others[0]} is no part of one" if others else "it has no tensors"
        raise UserError(f"{path}: not a head of {MODEL}: {text}")
    return tensors


def _probed(args: argparse.Namespace, layers: Any, width: int, num_layers: int) -> range:
    """Return the probed blocks, counted from 0; raise UserError unless they are adjacent.

    Args:
        layers: `last`, `best`, a number of last blocks, or the numbers of blocks.
    """
    blocks: Any = layers
    if isinstance(layers, int):
        blocks = range(num_layers - layers, num_layers)
    elif layers == "last":
        blocks = range(max(0, num_layers - _PROBED), num_layers)
    elif layers == "best":
        blocks = _BEST.get(width, ())
    elif isinstance(layers, str):
        blocks = [int(each) if each.isdecimal() else -1 for each in layers.split(",")]
    if isinstance(blocks, Sequence) and blocks and isinstance(blocks[0], int):
        adjacent = range(blocks[0], blocks[0] + len(blocks))
        if adjacent.start >= 0 and adjacent.stop <= num_layers and list(blocks) == list(adjacent):
            return adjacent
    if args.head_layers is None:
        what = f"{args.source / SETTINGS}: probe_layers is {layers!r}, neither a number of last"
        raise UserError(f"{what} blocks nor adjacent blocks of {num_layers}")
    raise UserError(
        f"--head-layers is {layers}: say last, numbers of adjacent blocks from 0 to"
        f" {num_layers - 1}, or best for a trunk of a released size"
    )


def _new_head(width: int) -> dict[str, Tensor]:
    """Return the tensors of a head of two classes, whose logits are zero until it is trained."""
    generator, ones = torch.Generator().manual_seed(0), torch.ones(width)

    def drawn(*shape: int, std: float) -> Tensor:
        return std * torch.randn(*shape, generator=generator)

    return {
        # If these were zero too, it could not be trained.
        "head.cls_token": drawn(1, 1, width, std=0.02),
        "head.k.weight": drawn(width, width, std=width**-0.5),
        "head.v.weight": drawn(width, width, std=width**-0.5),
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
