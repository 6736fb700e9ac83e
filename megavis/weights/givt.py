"""Convert GIVT's released Transformers to megavis' names, and infer their config.

Layers of the released checkpoints are named `decoder/EncDecBlock3/...`, or stacked on axis 1 of
`decoder/EncDecBlock/...`. A jointly trained adapter is under `params_adaptor/`, and the Vision
Transformer of an encoder-decoder model under `encoder/`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import ModelConfig
from megavis.papers.givt.config import (
    EncoderDecoderConfig,
    GIVTConfig,
    LatentTokensConfig,
    MaskGITConfig,
)
from megavis.papers.vae.config import LabelMapVAEConfig, VAEConfig
from megavis.weights.flax_layers import (
    Arrays,
    ReleasedArrays,
    adapter_weights,
    block_weights,
    dense,
    encoder_block_weights,
    norm,
    read_arrays,
)
from megavis.weights.released import ReleasedRun

Mode = Literal["causal", "maskgit"]
_IMAGENET_CLASSES = 1000
_SPECIAL_ROWS = 3
"""Rows of MaskGIT's table of labels that mark masked and other tokens and replace masked ones; they
follow the classes."""
_ADAPTER = "params_adaptor/"
_BLOCK = "decoder/EncDecBlock"
_ENCODER, _ENCODER_BLOCK = "encoder/", "encoder/encoderblock"


def read_transformer(args: argparse.Namespace) -> ReleasedRun:
    """Convert a causal or masked model, with its adapter if the file has one.

    Raises:
        UserError: the file is not such a checkpoint, or lacks the requested part.
    """
    arrays = dict(read_arrays(args.source))
    if args.adapter is not None:
        adapter = read_arrays(args.adapter)
        arrays |= {f"{_ADAPTER}{name}": array for name, array in adapter.items()}
    released = ReleasedModel(arrays, mode=args.mode, num_classes=args.num_classes)
    paper = released.objective()
    if args.tokenizer is not None:
        pixels = _pixels_of_a_latent(args.tokenizer)
        update = {"tokenizer": str(args.tokenizer), "downsampling": pixels}
        paper = paper.model_copy(update=update)
    size = released.side * paper.downsampling
    if released.image_size not in (None, size):
        raise UserError(
            f"the encoder reads images of {released.image_size}² pixels, and the VAE of --tokenizer"
            f" gives {released.side}² latents of images of {size}²"
        )
    return ReleasedRun(
        paper, released.weights(), image_size=size, sections={"model": released.model()}
    )


def _pixels_of_a_latent(run_folder: Path) -> int:
    path = run_folder / "config.yaml"
    paper = load_config(path).config.objective
    if isinstance(paper, LabelMapVAEConfig):
        return paper.downsampling
    if not isinstance(paper, VAEConfig):
        raise UserError(f"--tokenizer: {run_folder} is a run of {paper.name}, not of a VAE")
    return paper.shape.downsampling


@dataclass(frozen=True)
class ReleasedModel(ReleasedArrays):
    """A released Transformer, and settings that may not follow from its arrays.

    Attributes:
        mode: causal or masked; None to infer it from the number of positions.
        num_classes: number of classes; None to infer it from the rows of the labels.
    """

    mode: Mode | None = None
    num_classes: int | None = None

    def objective(self) -> LatentTokensConfig:
        """Infer the `objective` section.

        Raises:
            UserError: it cannot be inferred, or the arrays are those of another model.
        """
        stacked = self._stacked()
        keys: dict[str, Any] = {
            "latent_channels": self._token_size // stacked,
            "stacked_latents": stacked,
            **self._density(),
            **self._labels(),
            **self._adapter(),
        }
        if self.has_encoder:
            return EncoderDecoderConfig(**keys, **self._encoder())
        return MaskGITConfig(**keys) if self.is_masked else GIVTConfig(**keys)

    def _density(self) -> dict[str, Any]:
        """Infer the density from the number of outputs for tokens of d channels."""
        outputs, size = self._num_outputs, self._token_size
        if outputs == size**2 + size:
            return {"num_components": 1, "covariance": "full"}
        num_components, rest = divmod(outputs, 1 + 2 * size)
        if not rest:
            return {"num_components": num_components, "covariance": "diagonal"}
        if self._is_per_channel:
            return {"num_components": 1, "covariance": "diagonal"}
        num_components, rest = divmod(outputs, 3 * size)
        if not rest:
            raise UserError(
                f"the file has a mixture of {num_components} components for each of the {size}"
                " channels; megavis has mixtures of whole tokens"
            )
        raise UserError(f"{outputs} outputs do not form a mixture of tokens of {size} channels")

    @property
    def _is_per_channel(self) -> bool:
        """True if each channel has its own logit, mean and scale.

        The released models for dense prediction do (`per_channel_mixtures` with k = 1). For d = 2 a
        full covariance has the same number of outputs, and takes precedence.
        """
        return self._num_outputs == 3 * self._token_size and self._token_size > 2

    def _head(self) -> Arrays:
        """Return the last layer: k logits, then means and scales.

        With `_is_per_channel`, the d logits have no effect, since a softmax over one component is
        1; they are replaced by a single zero logit.
        """
        layer = {part: self.array(f"decoder/LogitsDense/{part}") for part in ("kernel", "bias")}
        if not self._is_per_channel:
            return layer
        size = self._token_size
        return {
            part: np.concatenate([np.zeros_like(array[..., :1]), array[..., size:]], axis=-1)
            for part, array in layer.items()
        }

    @property
    def _token_size(self) -> int:
        """Channels d of a token."""
        return self.array("EmbedTargets/kernel").shape[0]

    @property
    def _num_outputs(self) -> int:
        return self.array("decoder/LogitsDense/kernel").shape[1]

    @property
    def _blocks(self) -> list[Arrays]:
        return self.blocks(_BLOCK, axis=1)

    def model(self) -> ModelConfig:
        """Infer the `model` section."""
        blocks = self._blocks
        _, heads, head_size = blocks[0]["SelfAttn/query/kernel"].shape
        return ModelConfig(
            num_layers=len(blocks),
            hidden_size=heads * head_size,
            num_attention_heads=heads,
            ffn_hidden_size=blocks[0]["MLP/Dense_0/kernel"].shape[1],
            normalization="layer_norm",
            norm_bias="last",
            norm_epsilon=1e-6,
            activation="gelu_tanh",
            add_bias=True,
            attention_bias=False,
        )

    @property
    def side(self) -> int:
        """Side of the grid of latents."""
        return math.isqrt(self._num_tokens * self._stacked())

    @property
    def has_encoder(self) -> bool:
        """True for an encoder-decoder model."""
        return any(name.startswith(_ENCODER) for name in self.arrays)

    @property
    def image_size(self) -> int | None:
        """Side in pixels of the encoder's images; None without an encoder."""
        if not self.has_encoder:
            return None
        patches = self.array("pos_embedding_encoder").shape[1]
        return math.isqrt(patches) * self.array("EmbedPatches/kernel").shape[0]

    def _encoder(self) -> dict[str, Any]:
        assert self.image_size is not None
        return {
            "encoder_layers": len(self.blocks(_ENCODER_BLOCK)),
            "encoder_patch_size": self.array("EmbedPatches/kernel").shape[0],
            "downsampling": self.image_size // self.side,
        }

    @property
    def is_masked(self) -> bool:
        """True for MaskGIT, which has one more position than tokens."""
        if self.mode is not None:
            return self.mode == "maskgit"
        count = self.array("decoder/pos_emb").shape[1]
        causal, masked = (any(_is_square(n * s) for s in (1, 2)) for n in (count, count - 1))
        if causal == masked:
            raise UserError(f"{count} positions do not identify the model; pass --mode")
        return masked

    def weights(self) -> dict[str, Tensor]:
        """Return float32 tensors under megavis' names.

        Raises:
            UserError: an array is missing.
        """
        positions = self.tensor("decoder/pos_emb")[0]
        named = {
            **self._label_weights(),
            **dict(dense("embedding.content", self.arrays, "EmbedTargets/")),
            "embedding.positions.weight": positions[1:] if self.is_masked else positions,
            **dict(norm("head.norm", self.arrays, "decoder/LayerNorm/")),
            **dict(dense("head.linear", self._head())),
        }
        if self.is_masked:
            named["embedding.front_position"] = positions[0]
        for name, tensor in adapter_weights(self.inside(_ADAPTER)).items():
            named[f"embedding.transform.{name}"] = tensor
        for number, block in enumerate(self._blocks):
            for name, tensor in block_weights(block):
                named[f"blocks.{number}.{name}"] = tensor
        if self.has_encoder:
            named |= {f"embedding.encoder.{n}": tensor for n, tensor in self._encoder_weights()}
        return {name: tensor.float().contiguous() for name, tensor in named.items()}

    def _encoder_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the encoder's tensors under megavis' names."""
        patches = {
            "kernel": self.array("EmbedPatches/kernel").reshape(-1, self.model().hidden_size),
            "bias": self.array("EmbedPatches/bias"),
        }
        yield from dense("linear_patches", patches)
        yield "positions.weight", self.tensor("pos_embedding_encoder")[0]
        yield from norm("norm", self.inside("encoder/encoder_norm/"))
        for number, block in enumerate(self.blocks(_ENCODER_BLOCK)):
            for name, tensor in encoder_block_weights(block):
                yield f"blocks.{number}.{name}", tensor

    def _label_weights(self) -> dict[str, Tensor]:
        """Return the table of labels, and MaskGIT's special rows of it as parts of their own."""
        table, classes = self.tensor("EmbedLabels/embedding"), self._labels()["num_classes"]
        if not self.is_masked:
            name = "embedding.start.weight" if classes else "embedding.start"
            return {name: table if classes else table[0]}
        first = max(classes, 1)
        special = table[first : first + _SPECIAL_ROWS]
        return {
            "embedding.front" + ".weight" * (classes > 0): torch.cat(
                [table[:first], table[first + _SPECIAL_ROWS :]]
            ),
            "embedding.marks": special[:2],  # of masked tokens, and of others
            "embedding.mask": special[2],
        }

    def _labels(self) -> dict[str, Any]:
        """Infer the number of classes and the null label from the rows of the table."""
        rows = self.array("EmbedLabels/embedding").shape[0] - _SPECIAL_ROWS * self.is_masked
        classes = self.num_classes
        if classes is None:
            classes = {1: 0, _IMAGENET_CLASSES: 1000, _IMAGENET_CLASSES + 1: 1000}.get(rows)
        if classes is None or rows - max(1, classes) not in (0, 1 if classes else 0):
            raise UserError(_num_classes_error(rows, classes))
        return {"num_classes": classes, "label_dropout": 0.1 if rows > max(1, classes) else 0.0}

    def _adapter(self) -> dict[str, Any]:
        arrays = self.inside(_ADAPTER)
        if not arrays:
            return {}
        blocks = {name.split("/")[0] for name in arrays}
        bottleneck = 2 * arrays["modules_0/Conv_0/kernel"].shape[3]
        return {"adapter_blocks": len(blocks), "adapter_bottleneck": bottleneck}

    @property
    def _num_tokens(self) -> int:
        return int(self.array("decoder/pos_emb").shape[1] - self.is_masked)

    def _stacked(self) -> int:
        """Infer whether pairs are stacked: the number of tokens is then half a square."""
        return 1 if _is_square(self._num_tokens) else 2


def _num_classes_error(rows: int, classes: int | None) -> str:
    """Return an error message with the valid --num-classes for a table of `rows` rows."""
    given = "" if classes is None else f"--num-classes {classes} does not fit the file: "
    allowed = f"{rows - 1}, with a null label, or {rows}, without"
    if rows == 1:
        allowed = "1, or nothing for a model without classes"
    return f"{given}the table of labels has {rows} rows: pass --num-classes {allowed}"


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number
