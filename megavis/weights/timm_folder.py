"""Folders of `timm` with a Vision Transformer, as DARL models with full attention, and back."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN
from megavis.weights.released import (
    SETTINGS,
    WEIGHTS,
    Released,
    ReleasedTensors,
    check_sizes,
    missing_file,
    read_json,
    read_tensors,
)
from megavis.weights.tables import count
from megavis.weights.vits import TIMM, check_statistics, class_names, vit_run

EPSILON = 1e-6
"""Epsilon of the norms in timm's ViTs."""
# Heads of timm's architectures, by the second part of a name such as `vit_huge_patch14_224`.
_HEADS = {
    "tiny": 3,
    "small": 6,
    "medium": 8,
    "base": 12,
    "large": 16,
    "huge": 16,
    "giant": 16,
    "gigantic": 16,
    "vit": 2,
}
_USUAL_HEAD = 64
_MEAN = {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True}
"""Arguments of `VisionTransformer` with which its classifier reads the mean of all tokens."""
_PLAIN: Mapping[str, Any] = {
    "in_chans": 3,
    "qkv_bias": True,
    "proj_bias": True,
    "class_token": True,
    "pos_embed": "learn",
    "final_norm": True,
    "norm_layer": "layernorm",
    "act_layer": "gelu",
}
"""Arguments that a plain ViT has; others must be None, False or 0, except for those below."""
_FREE = re.compile(
    "img_size|patch_size|num_classes|global_pool|embed_dim|depth|num_heads|mlp_ratio|fc_norm"
    r"|pool_include_prefix|dynamic_img_(size|pad)|\w*drop_rate|drop_path_rate|weight_init|fix_init"
)
_OTHERS = {
    "reg_token": "register tokens",
    "dist_token": "a distillation token",
    "norm_pre.weight": "a norm before its blocks",
    "fc_norm.weight": "a norm after pooling",
    "blocks.0.ls1.gamma": "layer scale",
    "blocks.0.attn.q_norm.weight": "norms of queries and keys",
}
"""Tensors that show that a network is no plain ViT."""


def read_timm(args: argparse.Namespace) -> Released:
    """Read a folder written by timm's `save_for_hf`; `config.json` may be missing.

    Attention heads are those of `config.json`: its `model_args`, or the architecture's. If it does
    not say, `--heads` gives them, by default width / 64.

    Raises:
        UserError: the folder does not contain a plain ViT with a class token.
    """
    weights, path = args.source / WEIGHTS, args.source / SETTINGS
    if not weights.exists():
        raise missing_file(weights, "save the model with timm.models.save_for_hf")
    model = "a plain ViT with a class token"
    tensors = ReleasedTensors(read_tensors(weights), source=args.source, model=model)
    for name, what in _OTHERS.items():
        if name in tensors:
            raise UserError(f"{weights}: has {what} ({name}); only {model} can be imported")
    settings = read_json(path) if path.exists() else {}
    arguments = _section(path, settings, "model_args")
    width, cells = len(tensors["norm.weight"]), tensors["pos_embed"].shape[1] - 1
    if "cls_token" in tensors and round(cells**0.5) ** 2 != cells:
        raise UserError(f"{cells} positions after that of the class token are not a square grid")
    patch_size = tensors["patch_embed.proj.weight"].shape[-1]
    sizes = {
        "num_hidden_layers": count(tensors, TIMM.blocks),
        "hidden_size": width,
        "num_attention_heads": _heads(path, settings, width, args.heads),
        "intermediate_size": len(tensors["blocks.0.mlp.fc1.weight"]),
        "layer_norm_eps": EPSILON,
        "patch_size": patch_size,
        "image_size": patch_size * round(cells**0.5),
    }
    for key, size in (("embed_dim", width), ("depth", sizes["num_hidden_layers"])):
        if arguments.get(key, size) != size:
            raise UserError(f"{path}: {key} is {arguments[key]!r}, and the weights have {size}")
    classifies = f"{TIMM.classifier}.weight" in tensors
    read_out = _read_out(path, settings, classifies=classifies)
    # Old versions of timm write the keys of `pretrained_cfg` beside the others.
    pretrained = _section(path, settings, "pretrained_cfg") or settings
    mean, deviation = pretrained.get("mean", CHANNEL_MEAN), pretrained.get("std", CHANNEL_DEVIATION)
    check_statistics(path, mean=mean, std=deviation)
    names = settings.get("label_names") or pretrained.get("label_names")
    return vit_run(
        tensors,
        sizes,
        TIMM,
        statistics=(mean, deviation),
        read_out=read_out,
        classes=class_names(names),
    )


def _section(path: Path, settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = settings.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"{path}: {key} is {found!r}, not an object")
    return found


def _heads(path: Path, settings: Mapping[str, Any], width: int, given: int | None) -> int:
    """Return the attention heads; raise UserError if they are not known, or do not fit."""
    arguments = _section(path, settings, "model_args")
    if "num_heads" in arguments:
        check_sizes(path, arguments, "num_heads")
        stated = int(arguments["num_heads"])
        if given not in (None, stated):
            raise UserError(f"--heads {given}: {path} says {stated}; leave the option out")
        heads = stated
    else:
        parts = str(settings.get("architecture", "")).split("_")
        named = _HEADS.get(parts[1]) if len(parts) > 1 else None
        if given is named is None and "embed_dim" in arguments:
            raise UserError(f"{path}: gives a width, but no num_heads in model_args; pass --heads")
        heads = given or named or max(1, width // _USUAL_HEAD)
    if width % heads:
        raise UserError(f"a width of {width} is not divisible by {heads} heads; pass --heads")
    return heads


def _read_out(path: Path, settings: Mapping[str, Any], *, classifies: bool) -> str:
    """Return `finetune.read_out` for the arguments of the network.

    Raises:
        UserError: they describe no plain ViT, or no classifier that a run can have.
    """
    arguments = _section(path, settings, "model_args")
    for key, value in arguments.items():
        plain = _PLAIN.get(key)
        if _FREE.fullmatch(key) or value is None or value == plain or (plain is None and not value):
            continue
        only = f"only {plain!r} can be imported" if key in _PLAIN else "such a ViT has other layers"
        raise UserError(f"{path}: {key} is {value!r}; {only}")
    pool = arguments.get("global_pool", settings.get("global_pool", "token"))
    if {**arguments, "global_pool": pool} == {**arguments, **_MEAN}:
        return "mean"
    if arguments.get("fc_norm") or pool != "token" and (pool or classifies):
        raise UserError(
            f"{path}: global_pool is {pool!r} with fc_norm {arguments.get('fc_norm')!r}; only"
            " 'token' can be imported, or 'avg' with fc_norm false and pool_include_prefix true"
        )
    return "first"


def timm_settings(
    sizes: Mapping[str, Any], classes: Sequence[str], *, read_out: str = "first"
) -> dict[str, Any]:
    """Return the `config.json` for `timm.create_model("local-dir:DIR")`.

    Args:
        sizes: keys of transformers' ViT.
        classes: names of the classes; none without a classifier.
        read_out: what the classifier reads, `first` or `mean` as `finetune.read_out`.

    Raises UserError if the norms have another epsilon than timm's ViTs.
    """
    num_classes = len(classes)
    epsilon, side, width = sizes["layer_norm_eps"], sizes["image_size"], sizes["hidden_size"]
    if epsilon != EPSILON:
        raise UserError(f"timm's ViTs have model.norm_epsilon {EPSILON}, not {epsilon}")
    pooling = _MEAN if read_out == "mean" else {"global_pool": "token"}
    return {
        # One name for all sizes: `model_args` override the architecture's.
        "architecture": "vit_base_patch16_224",
        "num_classes": num_classes,
        **({"label_names": list(classes)} if classes else {}),
        "num_features": width,
        "global_pool": pooling["global_pool"],
        "model_args": {
            "img_size": side,
            "patch_size": sizes["patch_size"],
            "embed_dim": width,
            "depth": sizes["num_hidden_layers"],
            "num_heads": sizes["num_attention_heads"],
            "mlp_ratio": _ratio(sizes["intermediate_size"], width),
            **pooling,
        },
        "pretrained_cfg": {
            "num_classes": num_classes,
            "input_size": [3, side, side],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": list(CHANNEL_MEAN),
            "std": list(CHANNEL_DEVIATION),
            "first_conv": TIMM.patches,
            "classifier": TIMM.classifier,
        },
    }


def _ratio(inner: int, width: int) -> float:
    """Return the ratio of two widths, of which timm rounds the product with `width` down."""
    ratio = inner / width
    return ratio if int(width * ratio) == inner else math.nextafter(ratio, math.inf)
