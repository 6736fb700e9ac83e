"""Start an encoder from a pretrained Vision Transformer: the run of another model.

The class token is dropped, positions are resized, and the statistics by which the other run
standardises pixels are folded into the patch embedding, since an encoder reads pixels in [-1, 1].

Legend: n patches of d values, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import ModelConfig, RunConfig
from megavis.model.encoder import EncoderSizes
from megavis.model.positions import LEARNED, cell_coordinates, resize_table, sincos
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, for_other_pixels

KEY = "objective.encoder_from_run"
"""Config key that names the other run."""

_PATCHES = {"linear_patches.weight": "weight", "linear_patches.bias": "bias"}
_ENCODER_MEAN = _ENCODER_DEVIATION = (0.5, 0.5, 0.5)
_KEYS = {
    "num_layers": "objective.encoder_layers",
    "hidden_size": "objective.encoder_hidden_size",
    "num_attention_heads": "objective.encoder_num_attention_heads",
    "mlp_size": "model.ffn_hidden_size",
    "normalization": "model.normalization",
    "norm_epsilon": "objective.encoder_norm_epsilon",
    "activation": "objective.encoder_activation",
    "norm_bias": None,
    "add_bias": None,
    "has_biased_attention": None,
}
"""Settings that decide what weights mean, and this run's keys for them."""


@dataclass(frozen=True)
class PretrainedEncoder:
    """Initial weights of an encoder.

    Attributes:
        checkpoint: folder of a step of the other run.
        source: config of the other run.
        prefix: of the encoder's parameter names.
        num_patches: n, patches that the encoder reads.
    """

    checkpoint: Path
    source: RunConfig
    prefix: str
    num_patches: int

    @classmethod
    def open(
        cls, run: Path, model: ModelConfig, sizes: EncoderSizes, *, prefix: str, num_patches: int
    ) -> PretrainedEncoder:
        """Open another run and compare it with the encoder.

        Args:
            run: folder of the other run.
            model: of the encoder's blocks.
            sizes: of the encoder.
            prefix: of the encoder's parameter names.
            num_patches: n.

        Raises:
            UserError: there is no such run, or its weights do not fit.
        """
        checkpoint = chosen_checkpoint(run, None)
        source = load_config(run / "config.yaml").config
        difference = next(_differences(source, model, sizes), None)
        if difference is not None:
            raise UserError(f"{run} {difference}")
        return cls(checkpoint, source, f"{prefix}.", num_patches)

    def tensor(self, reader: CheckpointReader, name: str) -> Tensor | None:
        """Return the whole initial value of a parameter; None for those not of the other run.

        Args:
            reader: of `checkpoint`.
            name: of a parameter of this run's model.
        """
        if not name.startswith(self.prefix):
            return None
        inner = name.removeprefix(self.prefix)
        if inner in _PATCHES:
            return self._patches(reader)[_PATCHES[inner]]
        if inner == "positions.weight":
            return resize_table(self._positions(reader), self.num_patches)
        if inner.startswith("norm."):
            # An autoencoder's norm comes before its decoder.
            bridge = f"bridge.{inner}"
            has_bridge = reader.shape(f"weight/{bridge}") is not None
            return reader.read(reader.weight_key(bridge if has_bridge else f"head.{inner}"))
        if inner.startswith("blocks."):
            return reader.read(reader.weight_key(inner))
        return None

    def _patches(self, reader: CheckpointReader) -> dict[str, Tensor]:
        weight, bias = (
            reader.read(reader.weight_key(f"embedding.patches.{kind}"))
            for kind in ("weight", "bias")
        )
        weight, bias = for_other_pixels(
            weight,
            bias,
            (CHANNEL_MEAN, CHANNEL_DEVIATION),
            (_ENCODER_MEAN, _ENCODER_DEVIATION),
        )
        return {"weight": weight, "bias": bias}

    def _positions(self, reader: CheckpointReader) -> Tensor:
        """Return the other run's table of positions, `[n', h]`."""
        if reader.shape(f"weight/{LEARNED}") is not None:
            return reader.read(reader.weight_key(LEARNED))
        model, side = self.source.model, self.source.data.image_size // _patch_size(self.source)
        coordinates = cell_coordinates(torch.arange(side**2), side)
        return sincos(model.position_scale * coordinates, model.hidden_size)


def _patch_size(config: RunConfig) -> int:
    size: int = getattr(config.objective, "patch_size", 0)
    return size


def _differences(source: RunConfig, model: ModelConfig, sizes: EncoderSizes) -> Iterator[str]:
    """Yield reasons why the weights of `source` do not fit."""
    name, tuned = source.objective.name, source.finetune
    is_vit = name == "darl" and tuned is not None and tuned.visibility == "full"
    if name != "mae" and not is_vit:
        yield (
            f"is a run of {name}; an encoder starts from a run of mae, or from one that"
            " `megavis import timm` or `vit` has made"
        )
    kind = source.model.positions or ("sincos" if name == "mae" else "none")
    if kind not in ("learned", "sincos"):
        yield f"has model.positions {kind}, and the encoder adds learned positions"
    if _patch_size(source) != sizes.patch_size:
        yield (
            f"has patches of {_patch_size(source)} pixels, and the encoder of {sizes.patch_size}"
            " (objective.encoder_patch_size)"
        )
    for field, key in _KEYS.items():
        there, here = getattr(source.model, field), getattr(model, field)
        if there != here:
            yield f"has {field} {there}, and the encoder {here}" + (f" ({key})" if key else "")
