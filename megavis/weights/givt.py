"""GIVT's released Transformers: their config, which is read from the arrays, and names.

Layers of the released checkpoints are named `decoder/EncDecBlock3/...`, or stacked on axis 1 of
`decoder/EncDecBlock/...`. A jointly trained adapter is under `params_adaptor/`, and the Vision
Transformer of an encoder-decoder model under `encoder/`.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.papers.givt.config import (
    EncoderDecoderConfig,
    GIVTConfig,
    LatentTokensConfig,
    MaskGITConfig,
)
from megavis.weights.flax_layers import (
    adapter_rows,
    decoder_block,
    dense,
    encoder_blocks,
    norm,
    unstacked,
)
from megavis.weights.released import Released, ReleasedTensors, read_arrays
from megavis.weights.tables import BATCHED, SAME, Layout, Row, Table, count
from megavis.weights.vaes import with_vae

Mode = Literal["causal", "maskgit"]
_IMAGENET_CLASSES = 1000
_SPECIAL_ROWS = 3
"""Rows of MaskGIT's table of labels that mark masked and other tokens and replace masked ones; they
follow the classes."""
_ADAPTER = "params_adaptor/"
_BLOCK = "decoder/EncDecBlock"
_ENCODER, _ENCODER_BLOCK = "encoder/", "encoder/encoderblock_"


def read_transformer(args: argparse.Namespace) -> Released:
    """Read a causal or masked model, with its adapter if the file has one.

    Raises:
        UserError: the file is not such a checkpoint, or lacks the requested part.
    """
    arrays = read_arrays(args.source)
    if args.adapter is not None:
        adapter = read_arrays(args.adapter)
        arrays |= {f"{_ADAPTER}{name}": array for name, array in adapter.items()}
    arrays = unstacked(unstacked(arrays, _BLOCK, axis=1), _ENCODER_BLOCK)
    tensors = ReleasedTensors(arrays, source=args.source, model="a released GIVT")
    released = ReleasedModel(tensors, mode=args.mode, num_classes=args.num_classes)
    paper = with_vae(released.objective(), args.tokenizer)
    size = released.side * paper.downsampling
    if released.image_size not in (None, size):
        raise UserError(
            f"the encoder reads images of {released.image_size}² pixels, and the VAE of --tokenizer"
            f" gives {released.side}² latents of images of {size}²"
        )
    return Released(
        paper,
        tensors,
        released.table(),
        image_size=size,
        sections={"model": released.model()},
        part=args.adapter,
    )


@dataclass(frozen=True)
class ReleasedModel:
    """A released Transformer, and settings that may not follow from its arrays.

    Attributes:
        tensors: its arrays, with the blocks' unstacked.
        mode: causal or masked; None to infer it from the number of positions.
        num_classes: number of classes; None to infer it from the rows of the labels.
    """

    tensors: ReleasedTensors
    mode: Mode | None = None
    num_classes: int | None = None

    def objective(self) -> LatentTokensConfig:
        """Infer the `objective` section.

        Raises:
            UserError: it cannot be inferred, or the arrays belong to another model.
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

    def _head(self) -> Layout:
        """Return the layout of the last layer's bias: k logits, then means and scales.

        With `_is_per_channel`, the d logits have no effect, since a softmax over one component is
        1; they are replaced by a single zero logit.
        """
        if not self._is_per_channel:
            return SAME
        size = self._token_size
        return Layout(
            lambda x: torch.cat([torch.zeros_like(x[..., :1]), x[..., size:]], -1),
            lambda x: torch.cat([x[..., :1].expand(*x.shape[:-1], size), x[..., 1:]], -1),
        )

    @property
    def _token_size(self) -> int:
        """Channels d of a token."""
        return self.tensors["EmbedTargets/kernel"].shape[0]

    @property
    def _num_outputs(self) -> int:
        return self.tensors["decoder/LogitsDense/kernel"].shape[1]

    @property
    def _num_layers(self) -> int:
        return count(self.tensors, _BLOCK)

    def model(self) -> ModelConfig:
        """Infer the `model` section."""
        _, heads, head_size = self.tensors[f"{_BLOCK}0/SelfAttn/query/kernel"].shape
        return ModelConfig(
            num_layers=self._num_layers,
            hidden_size=heads * head_size,
            num_attention_heads=heads,
            ffn_hidden_size=self.tensors[f"{_BLOCK}0/MLP/Dense_0/kernel"].shape[1],
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
        return any(name.startswith(_ENCODER) for name in self.tensors)

    @property
    def image_size(self) -> int | None:
        """Side in pixels of the encoder's images; None without an encoder."""
        if not self.has_encoder:
            return None
        patches = self.tensors["pos_embedding_encoder"].shape[1]
        return math.isqrt(patches) * self.tensors["EmbedPatches/kernel"].shape[0]

    def _encoder(self) -> dict[str, Any]:
        assert self.image_size is not None
        return {
            "encoder_layers": count(self.tensors, _ENCODER_BLOCK),
            "encoder_patch_size": self.tensors["EmbedPatches/kernel"].shape[0],
            "downsampling": self.image_size // self.side,
        }

    @property
    def is_masked(self) -> bool:
        """True for MaskGIT, which has one more position than tokens."""
        if self.mode is not None:
            return self.mode == "maskgit"
        rows = self.tensors["decoder/pos_emb"].shape[1]
        causal, masked = (any(_is_square(n * s) for s in (1, 2)) for n in (rows, rows - 1))
        if causal == masked:
            raise UserError(f"{rows} positions do not identify the model; pass --mode")
        return masked

    def table(self) -> Table:
        """Map our tensors to the arrays' names."""
        head, theirs = self._head(), "decoder/LogitsDense"
        rows = [
            self._label_row(),
            self._position_row(),
            *dense("embedding.content", "EmbedTargets"),
            *norm("head.norm", "decoder/LayerNorm"),
            Row(
                "head.linear.weight",
                f"{theirs}/kernel",
                Layout(lambda x: head.read(x).t(), lambda x: head.write(x.t())),
            ),
            Row("head.linear.bias", f"{theirs}/bias", head),
        ]
        for number in range(self._num_layers):
            rows += decoder_block(
                f"blocks.{number}",
                f"{_BLOCK}{number}",
                self.tensors[f"{_BLOCK}0/SelfAttn/query/kernel"].shape[1],
                has_memory=self.has_encoder,
            )
        if self._has_adapter:
            rows += adapter_rows(self.tensors, "embedding.transform.", _ADAPTER)
        return rows + self._encoder_rows() if self.has_encoder else rows

    def _position_row(self) -> Row:
        """Return the row of positions, the first of which is for MaskGIT's label."""
        ours, theirs = "embedding.positions.weight", "decoder/pos_emb"
        if not self.is_masked:
            return Row(ours, theirs, BATCHED)
        layout = Layout(
            lambda x: (x[0, 0], x[0, 1:]), lambda first, x: torch.cat([first[None], x])[None]
        )
        return Row(("embedding.front_position", ours), theirs, layout)

    def _label_row(self) -> Row:
        """Return the row of labels, apart from MaskGIT's special rows, which are separate parts."""
        theirs, classes = "EmbedLabels/embedding", self._labels()["num_classes"]
        if not self.is_masked:
            return (
                Row("embedding.start.weight", theirs)
                if classes
                else Row("embedding.start", theirs, BATCHED)
            )
        first = max(classes, 1)

        def read(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            special, rest = table[first : first + _SPECIAL_ROWS], table[first + _SPECIAL_ROWS :]
            return torch.cat([table[:first], rest]), special[:2], special[2]

        def write(front: Tensor, marks: Tensor, mask: Tensor) -> Tensor:
            return torch.cat([front[:first], marks, mask[None], front[first:]])

        front = "embedding.front.weight" if classes else "embedding.front"
        # The marks of masked tokens and of others.
        return Row((front, "embedding.marks", "embedding.mask"), theirs, Layout(read, write))

    def _encoder_rows(self) -> list[Row]:
        """Return the rows of the encoder."""
        ours, side = "embedding.encoder", self.tensors["EmbedPatches/kernel"].shape[0]
        kernel = Layout(
            lambda x: x.flatten(0, 2).t(), lambda x: x.t().unflatten(0, (side, side, 3))
        )
        return [
            Row(f"{ours}.linear_patches.weight", "EmbedPatches/kernel", kernel),
            Row(f"{ours}.linear_patches.bias", "EmbedPatches/bias"),
            Row(f"{ours}.positions.weight", "pos_embedding_encoder", BATCHED),
            *norm(f"{ours}.norm", "encoder/encoder_norm"),
            *encoder_blocks(f"{ours}.blocks.", _ENCODER_BLOCK, self.tensors),
        ]

    def _labels(self) -> dict[str, Any]:
        """Infer the number of classes and the null label from the rows of the table."""
        rows = self.tensors["EmbedLabels/embedding"].shape[0] - _SPECIAL_ROWS * self.is_masked
        classes = self.num_classes
        if classes is None:
            classes = {1: 0, _IMAGENET_CLASSES: 1000, _IMAGENET_CLASSES + 1: 1000}.get(rows)
        if classes is None or rows - max(1, classes) not in (0, 1 if classes else 0):
            raise UserError(_num_classes_error(rows, classes))
        return {"num_classes": classes, "label_dropout": 0.1 if rows > max(1, classes) else 0.0}

    @property
    def _has_adapter(self) -> bool:
        return any(name.startswith(_ADAPTER) for name in self.tensors)

    def _adapter(self) -> dict[str, Any]:
        if not self._has_adapter:
            return {}
        hidden = self.tensors[f"{_ADAPTER}modules_0/Conv_0/kernel"].shape[3]
        blocks = count(self.tensors, f"{_ADAPTER}modules_")
        return {"adapter_blocks": blocks, "adapter_bottleneck": 2 * hidden}

    @property
    def _num_tokens(self) -> int:
        return int(self.tensors["decoder/pos_emb"].shape[1] - self.is_masked)

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
