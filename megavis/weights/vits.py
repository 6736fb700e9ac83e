"""Vision Transformers of `timm` and `transformers` as DARL models with full attention, and back.

With full attention, DARL's start token is a class token, and its patch embedding and blocks are
those of a ViT: such a run has timm's features, and can be fine-tuned like any other.

Legend: T patches, h hidden size.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import FinetuneConfig, ModelConfig, RunConfig
from megavis.papers.darl.config import DARLConfig
from megavis.tokenizers.patches import (
    CHANNEL_DEVIATION,
    CHANNEL_MEAN,
    Statistics,
    for_other_pixels,
)
from megavis.weights.released import (
    SETTINGS,
    Released,
    ReleasedTensors,
    check_divides,
    check_fixed,
    check_sizes,
    read_hub_folder,
    read_json,
)
from megavis.weights.tables import (
    Layout,
    Row,
    Table,
    count,
    joined_heads,
    layer,
    patches,
    read_table,
    with_blank_row,
)

IMAGENET: Statistics = (CHANNEL_MEAN, CHANNEL_DEVIATION)


@dataclass(frozen=True)
class ViTNames:
    """A library's names of the parts of a ViT.

    Attributes:
        front, positions, patches, norm, blocks, classifier: outside of the blocks; `blocks` is
            their prefix.
        parts: in a block, as pairs of megavis' and the library's name.
        projections: a block's query, key and value projections: one stacked matrix, or three.
    """

    front: str
    positions: str
    patches: str
    norm: str
    blocks: str
    classifier: str
    parts: tuple[tuple[str, str], ...]
    projections: tuple[str, ...]

    def block(self, ours: str, theirs: str, num_heads: int) -> list[Row]:
        """Return the rows of a block, whose names begin with these prefixes."""
        joined = joined_heads(num_heads, parts=len(self.projections))
        projections = tuple(f"{theirs}.{name}" for name in self.projections)
        rows = layer(f"{ours}.self_attention.linear_qkv", projections, joined)
        for own, name in self.parts:
            rows += layer(f"{ours}.{own}", f"{theirs}.{name}")
        return rows


TIMM = ViTNames(
    front="cls_token",
    positions="pos_embed",
    patches="patch_embed.proj",
    norm="norm",
    blocks="blocks.",
    classifier="head",
    parts=(
        ("input_layernorm", "norm1"),
        ("self_attention.linear_proj", "attn.proj"),
        ("pre_mlp_layernorm", "norm2"),
        ("mlp.linear_fc1", "mlp.fc1"),
        ("mlp.linear_fc2", "mlp.fc2"),
    ),
    projections=("attn.qkv",),
)
# The names in files on the Hub, which all versions of transformers can read.
TRANSFORMERS = ViTNames(
    front="embeddings.cls_token",
    positions="embeddings.position_embeddings",
    patches="embeddings.patch_embeddings.projection",
    norm="layernorm",
    blocks="encoder.layer.",
    classifier="classifier",
    parts=(
        ("input_layernorm", "layernorm_before"),
        ("self_attention.linear_proj", "attention.output.dense"),
        ("pre_mlp_layernorm", "layernorm_after"),
        ("mlp.linear_fc1", "intermediate.dense"),
        ("mlp.linear_fc2", "output.dense"),
    ),
    projections=tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
)
_OLDER = (
    (r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers."),
    (r"^(vit\.)?layers\.", r"\1encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
"""Names in transformers 5, as modules or as saved, and in transformers 4."""


def with_older_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of transformers 5 to the names that transformers 4 has, and keep others."""

    def older(name: str) -> str:
        for pattern, replacement in _OLDER:
            name = re.sub(pattern, replacement, name)
        return name

    return {older(name): tensor for name, tensor in tensors.items()}


# The class token has its own position, which is added to the token on import.
_TOKEN = Layout(
    lambda token, table: (token[0, 0] + table[0, 0], table[0, 1:]),
    lambda start, positions: (start.view(1, 1, -1), with_blank_row(positions)),
)


def vit_table(
    names: ViTNames,
    *,
    prefix: str = "",
    num_layers: int,
    num_heads: int,
    patch_size: int,
    classifies: bool,
    statistics: Statistics = IMAGENET,
) -> Table:
    """Return the names of a fine-tuning run of DARL with learned positions, and a library's.

    Args:
        prefix: before all of the library's names but the classifier's.
        statistics: mean and deviation by which pixels in [0, 1] are standardised. For others than
            ImageNet's, by which megavis always does, the patch embedding changes in an import.
    """
    kernels = patches(patch_size)

    def embedding(kernel: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return for_other_pixels(kernels.read(kernel), bias, statistics, IMAGENET)

    content, outer = "embedding.content", f"{prefix}{names.patches}"
    table = [
        Row(
            ("embedding.start", "embedding.positions.weight"),
            (f"{prefix}{names.front}", f"{prefix}{names.positions}"),
            _TOKEN,
        ),
        Row(
            (f"{content}.weight", f"{content}.bias"),
            (f"{outer}.weight", f"{outer}.bias"),
            Layout(embedding, lambda matrix, bias: (kernels.write(matrix), bias)),
        ),
        *layer("head.norm", f"{prefix}{names.norm}"),
    ]
    for number in range(num_layers):
        table += names.block(f"blocks.{number}", f"{prefix}{names.blocks}{number}", num_heads)
    return table + classifies * layer("head.classifier.linear", names.classifier)


def from_timm(
    tensors: Mapping[str, Tensor], *, num_heads: int, statistics: Statistics = IMAGENET
) -> dict[str, Tensor]:
    """Return the float32 weights of a fine-tuning run of DARL with learned positions."""
    table = vit_table(
        TIMM,
        num_layers=count(tensors, TIMM.blocks),
        num_heads=num_heads,
        patch_size=tensors[f"{TIMM.patches}.weight"].shape[-1],
        classifies=f"{TIMM.classifier}.weight" in tensors,
        statistics=statistics,
    )
    return read_table(table, tensors)


def read_vit(args: argparse.Namespace) -> Released:
    """Read a ViT folder of transformers; raises UserError where it is none."""
    settings, tensors = read_hub_folder(
        args.source, model="ViTModel", kind="vit", renamed=with_older_names
    )
    check_vit_settings(args.source / SETTINGS, settings)
    prefix = "vit." if any(name.startswith("vit.") for name in tensors) else ""
    return vit_run(
        tensors,
        settings,
        TRANSFORMERS,
        prefix=prefix,
        statistics=read_statistics(args.source),
        classes=class_names(settings.get("id2label")),
    )


def class_names(stored: Any) -> tuple[str, ...]:
    """Return the names of classes that a folder lists, or maps from their numbers.

    Empty if it names none, or only numbers them, as transformers does by default.
    """
    if isinstance(stored, dict):
        numbers = [str(number) for number in range(len(stored))]
        stored = [stored[key] for key in numbers] if set(stored) == set(numbers) else ()
    if not isinstance(stored, list) or not all(isinstance(name, str) for name in stored):
        return ()
    are_numbers = all(re.fullmatch(r"(LABEL_|class )\d+", name) for name in stored)
    return () if are_numbers else tuple(stored)


def vit_run(
    tensors: ReleasedTensors,
    settings: Mapping[str, Any],
    names: ViTNames,
    *,
    prefix: str = "",
    statistics: Statistics,
    read_out: Any = "first",
    classes: tuple[str, ...] = (),
) -> Released:
    """Return the run of a ViT.

    Args:
        tensors: as released; a classifier of zeros is added if there is none.
        settings: sizes in the words of transformers.
        prefix: as for `vit_table`.
        statistics: by which its pixels in [0, 1] are standardised.
        read_out: what its classifier reads, as `finetune.read_out`.
        classes: their names by label, which are not used unless there is one for each.
    """
    classifier = tensors.get(f"{names.classifier}.weight")
    if classifier is None:
        # A run has a classifier; this one starts at zero.
        tensors[f"{names.classifier}.weight"] = torch.zeros(2, settings["hidden_size"])
        tensors[f"{names.classifier}.bias"] = torch.zeros(2)
    elif len(classifier) < 2:
        raise UserError(
            f"{tensors.source}: its classifier has one output; at least two classes are needed"
        )
    model = vit_model(settings, "learned")
    return Released(
        DARLConfig(patch_size=settings["patch_size"]),
        tensors,
        vit_table(
            names,
            prefix=prefix,
            num_layers=model.num_layers,
            num_heads=model.num_attention_heads,
            patch_size=settings["patch_size"],
            classifies=True,
            statistics=statistics,
        ),
        image_size=settings["image_size"],
        sections={
            "model": model,
            "finetune": FinetuneConfig(
                num_classes=len(tensors[f"{names.classifier}.weight"]),
                visibility="full",
                read_out=read_out,
            ),
        },
        # Used for a pooled output, and for masked pre-training.
        ignored=r"(vit\.)?(pooler\.|embeddings\.mask_token$)|decoder\.0\.",
        validates=True,
        classes=classes if classifier is not None and len(classes) == len(classifier) else (),
    )


def vit_model(settings: Mapping[str, Any], positions: Any) -> ModelConfig:
    """Return the `model` section for the `config.json` of a ViT."""
    return ModelConfig(
        num_layers=settings["num_hidden_layers"],
        hidden_size=settings["hidden_size"],
        num_attention_heads=settings["num_attention_heads"],
        ffn_hidden_size=settings["intermediate_size"],
        normalization="layer_norm",
        # 1e-12 is the default of transformers' `ViTConfig`.
        norm_epsilon=settings.get("layer_norm_eps", 1e-12),
        activation="gelu",
        add_bias=True,
        positions=positions,
    )


def vit_sizes(config: RunConfig, *, num_layers: int, patch_size: int) -> dict[str, Any]:
    """Return the keys of a run's model that the `config.json` of any ViT of transformers has."""
    model = config.model
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.mlp_size,
        "hidden_act": "gelu",
        "layer_norm_eps": model.norm_epsilon,
        "image_size": config.data.image_size,
        "patch_size": patch_size,
        "num_channels": 3,
        "qkv_bias": True,
    }


def transformers_settings(sizes: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return the `config.json` of `ViTModel`, or with classes of `ViTForImageClassification`."""
    name = "ViTForImageClassification" if classes else "ViTModel"
    settings = {"architectures": [name], "model_type": "vit", **sizes}
    if classes:
        numbers = {name: index for index, name in enumerate(classes)}
        settings |= {"id2label": dict(enumerate(classes)), "label2id": numbers}
    return settings


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "image_size",
    "patch_size",
)


def check_vit_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Check the `config.json` at `path`.

    Raises:
        UserError: a size is missing or does not divide another, or the network has other layers.
    """
    check_sizes(path, settings, *_SIZES)
    check_fixed(path, settings, {"hidden_act": "gelu", "num_channels": 3, "qkv_bias": True})
    epsilon = settings.get("layer_norm_eps", 1e-12)
    if not isinstance(epsilon, float) or epsilon <= 0:
        raise UserError(f"{path}: layer_norm_eps is {epsilon!r}, not a positive number")
    check_divides(path, settings, "hidden_size", "num_attention_heads")
    check_divides(path, settings, "image_size", "patch_size")


def read_statistics(folder: Path) -> Statistics:
    """Return mean and deviation by which a folder's pixels in [0, 1] are standardised.

    Without `preprocessor_config.json` they are ImageNet's.

    Raises:
        UserError: the file contains something else.
    """
    path = folder / "preprocessor_config.json"
    if not path.exists():
        return IMAGENET
    found = read_json(path)
    half = [0.5] * 3  # What transformers' ViTImageProcessor has by default.
    mean, deviation = found.get("image_mean", half), found.get("image_std", half)
    check_statistics(path, image_mean=mean, image_std=deviation)
    if not found.get("do_normalize", True):
        mean, deviation = [0.0] * 3, [1.0] * 3
    factor = found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0
    if not isinstance(factor, float | int) or factor <= 0:
        raise UserError(f"{path}: rescale_factor is {factor!r}, not a positive number")
    scale = 255 * factor
    return tuple(v / scale for v in mean), tuple(v / scale for v in deviation)


def check_statistics(path: Path, **statistics: Any) -> None:
    """Check the mean and then the deviation of pixels, by their keys in the file at `path`.

    Raises:
        UserError: one of them is not three numbers, or a deviation is not positive.
    """
    for key, values in statistics.items():
        is_triple = isinstance(values, list | tuple) and len(values) == 3
        if not is_triple or not all(isinstance(value, float | int) for value in values):
            raise UserError(f"{path}: {key} is {values!r}, not three numbers")
    if min(values) <= 0:
        raise UserError(f"{path}: {key} is {values!r}; it must be positive")
