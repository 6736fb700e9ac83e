"""Condition on an image through an encoder, to whose output the blocks attend.

The encoder's patch embedding is a part of the first layer, its blocks are a stack of their own
(`model/encoder.py`). With pairs shards the encoder reads the image, and tokens are made from the
target; with jpeg shards, which hold one image per sample, that image is both.

An encoder may start from a pretrained Vision Transformer, the run of another model. The class token
is dropped, positions are resized, and the statistics by which the other run standardises pixels are
folded into the patch embedding, since an encoder reads pixels in [-1, 1].

Legend: b images, H and W pixels, n patches of d values, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megavis.checkpoint.format.folder import checkpoint_to_open
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.composition.condition import Condition, Encode, Known
from megavis.composition.parts import Parts, Role
from megavis.composition.tokens import Key, Tokens
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import ModelConfig, RunConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.loader import Batch
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig
from megavis.grammar.same_run import check_same_words
from megavis.grammar.words import AskWord, Mask, Patches, Shift
from megavis.model.core import Core
from megavis.model.encoder import EncoderInput, EncoderSizes
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parameters import add_options
from megavis.model.positions import LEARNED, cell_coordinates, resize_table, sincos
from megavis.model.stack import LayerPlan
from megavis.tokenizers.patches import CHANNEL_DEVIATION, CHANNEL_MEAN, for_other_pixels

_NAME = "embedding.encoder"
"""Prefix of the encoder's parameter names; some are in the first layer, `embedding`."""


_PATCHES = ("linear_patches.weight", "linear_patches.bias")
_KEYS: Mapping[str, str | None] = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "mlp_size": None,
    "normalization": None,
    "norm_epsilon": "norm_epsilon",
    "activation": "activation",
    "qk_norm": None,
    "norm_bias": None,
    "add_bias": None,
    "has_biased_attention": None,
}
"""Settings that decide what weights mean, and the encoder's own keys for them."""


class EncodedImage(Condition):
    """An image, after other conditions."""

    reads_images = True

    def __init__(
        self,
        image_size: int,
        sizes: EncoderSizes,
        *,
        others: Condition,
        key: Key,
    ) -> None:
        self.image_size, self.sizes, self.key = image_size, sizes, key
        self.others, own = others, others.given_text
        self.given_text = "the image" + (f" and {own}" if own else "")
        self.names = (*self.others.names, "image")
        self.roles: tuple[Role, ...] = (*self.others.roles, "encoder")

    @property
    def num_memory(self) -> int:
        """Patches that the encoder reads."""
        return self.sizes.num_patches(self.image_size)

    def layers(self, core: Core, *, num_rows: int, seed: int) -> list[LayerPlan]:
        """Return the encoder's blocks and its final norm."""
        size = self.image_size
        return self.sizes.layers(core, image_size=size, num_rows=num_rows, seed=seed, name=_NAME)

    def pretrained(self, run: str, above: ModelConfig) -> PretrainedEncoder:
        """Open the run that the encoder below `above` starts from, or raise UserError."""
        sizes, count = self.sizes, self.num_memory
        return PretrainedEncoder.open(
            Path(run), sizes.model(above), sizes, self.key, prefix=_NAME, num_patches=count
        )

    def check(self, manifest: Manifest, tokens: Tokens, name: str) -> Iterator[str]:
        """Check that shards hold images, or pairs of images and targets."""
        if manifest.kind not in ("pairs", "jpeg"):
            text = f"holds {manifest.kind} shards without images, which the encoder of {name} reads"
            yield f"{text}; give pairs or jpeg shards"
            return
        # Tokens are made from the target, which is an image: they check it as such.
        images = manifest.model_copy(update={"kind": "jpeg"})
        yield from self.others.check(images, tokens, name)

    def part(self, role: Role, core: Core) -> nn.Module | nn.Parameter | None:
        """Build the encoder's patch embedding, or a part of the other conditions."""
        if role != "encoder":
            return self.others.part(role, core)
        layer = EncoderInput(self.sizes.core(core, _NAME), self.sizes)
        add_options(layer.parameters(), self.sizes.options)
        return layer

    def predicted(self, samples: Tensor) -> Tensor:
        """Return the targets."""
        return images_and_targets(samples)[1]

    def training(self, batch: Batch) -> Known:
        """Return the other conditions, then the encoder's input."""
        images, _ = images_and_targets(batch.inputs)
        return *self.others.training(batch), self.encoder_input(images)

    def for_features(self, samples: Tensor) -> Known:
        """Return the other conditions for features, then the encoder's input."""
        images, _ = images_and_targets(samples)
        return *self.others.for_features(samples), self.encoder_input(images)

    def given(self, values: Mapping[str, Tensor], count: int, device: torch.device) -> Known:
        """Return the other conditions, then the encoder's input."""
        others = {name: value for name, value in values.items() if name != "image"}
        known = self.others.given(others, count, device)
        if "image" not in values:
            raise UserError("this model is conditioned on images: give those for its encoder")
        return *known, self.encoder_input(values["image"].to(device))

    def from_samples(self, samples: Tensor) -> Mapping[str, Tensor]:
        """Return the images."""
        return {"image": images_and_targets(samples)[0]}

    def null(self, known: Known) -> Known:
        """Return the same images with the null condition of the others."""
        *others, images = known
        return *self.others.null(tuple(others)), images

    def prepare(self, known: Known, encode: Encode) -> Known:
        """Replace the images by the encoder's output."""
        *others, images = known

        def embed(layer: nn.Module) -> PackedState:
            assert isinstance(layer, Parts)
            patches: LayerState = layer.part("encoder")(images)
            return patches.pack()

        return *others, encode(embed)

    def defaults(self, num_images: int, examples: Batch | None) -> Mapping[str, Tensor]:
        """Return the images and other conditions of the examples."""
        if examples is None:
            raise UserError("this model predicts from images: give data.validation")
        return {**self.from_samples(examples.inputs), **self.others.defaults(num_images, examples)}

    def balanced(self, numbers: Tensor) -> Mapping[str, Tensor]:
        """Raise UserError: every image is generated from another."""
        raise UserError("models conditioned on images cannot generate images without one")

    def shown(self, examples: Batch) -> list[Tensor]:
        """Return images and targets."""
        return list(images_and_targets(examples.inputs))

    def encoder_input(self, images: Tensor) -> Tensor:
        """Return images, uint8 or in [-1, 1], as `[b, H, W, 3]` in [-1, 1]; raise UserError."""
        side = self.image_size
        if images.shape[1:] != (side, side, 3):
            raise UserError(
                f"the encoder's images have shape {list(images.shape)}; this run expects"
                f" [b, {side}, {side}, 3], uint8 or in [-1, 1]"
            )
        return images.float() / 127.5 - 1.0 if images.dtype == torch.uint8 else images.float()


def images_and_targets(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Split pairs into images and targets; single images are both."""
    is_pair = samples.ndim == 5 and samples.shape[-1] == 3
    images, targets = samples.unbind(1) if is_pair else (samples, samples)
    return images, targets


@dataclass(frozen=True)
class PretrainedEncoder:
    """Initial weights of an encoder.

    Attributes:
        checkpoint: folder of a step of the other run.
        side: side of its grid of patches.
        prefix: begins the encoder's parameter names.
        num_patches: n, patches that the encoder reads.
    """

    checkpoint: Path
    source: RunConfig
    side: int
    prefix: str
    num_patches: int

    @classmethod
    def open(
        cls,
        run: Path,
        model: ModelConfig,
        sizes: EncoderSizes,
        key: Key,
        *,
        prefix: str,
        num_patches: int,
    ) -> PretrainedEncoder:
        """Open another run; raise UserError unless it fits `sizes` and the blocks' `model`."""
        checkpoint = checkpoint_to_open(run)
        source = load_config(run / "config.yaml").config
        check_same_words(checkpoint, read_manifest(checkpoint).words, source)
        difference = next(_differences(source, model, sizes, key), None)
        if difference is not None:
            raise UserError(f"{run} {difference}")
        side = source.data.image_size // sizes.keys.patch_size
        return cls(checkpoint, source, side, f"{prefix}.", num_patches)

    def tensor(self, reader: CheckpointReader, name: str) -> Tensor | None:
        """Return the whole initial value of a parameter; None if it is not from the other run."""
        if not name.startswith(self.prefix):
            return None
        inner = name.removeprefix(self.prefix)
        if inner in _PATCHES:
            return self._patches(reader)[_PATCHES.index(inner)]
        if inner == "positions.weight":
            return resize_table(self._positions(reader), self.num_patches)
        if inner.startswith("norm."):
            # An autoencoder's norm comes before its decoder.
            bridge = f"bridge.{inner}"
            has_bridge = reader.shape(f"weight/{bridge}") is not None
            return reader.read(reader.weight_key(bridge if has_bridge else f"head.{inner}"))
        return reader.read(reader.weight_key(inner)) if inner.startswith("blocks.") else None

    def _patches(self, reader: CheckpointReader) -> tuple[Tensor, Tensor]:
        weight, bias = (
            reader.read(reader.weight_key(f"embedding.content.{kind}"))
            for kind in ("weight", "bias")
        )
        encoder = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        return for_other_pixels(weight, bias, (CHANNEL_MEAN, CHANNEL_DEVIATION), encoder)

    def _positions(self, reader: CheckpointReader) -> Tensor:
        """Return the other run's table of positions, `[n', h]`."""
        if reader.shape(f"weight/{LEARNED}") is not None:
            return reader.read(reader.weight_key(LEARNED))
        model, side = self.source.model, self.side
        coordinates = cell_coordinates(torch.arange(side**2), side)
        return sincos(model.position_scale * coordinates, model.hidden_size)


def _grammar_of_vit(config: RunConfig) -> tuple[Grammar, Patches] | None:
    """Return the words of a run with full attention to patches, and its patches; else None."""
    if not isinstance(config.objective, PaperConfig):
        return None
    grammar, tuned = config.objective.grammar(config), config.finetune
    sees_all = grammar.asks.kind == "visible" or (tuned and tuned.visibility == "full")
    is_plain = not grammar.asks.norm and not grammar.is_modulated and grammar.memory is None
    if not (sees_all and is_plain and _holds_places(grammar.asks)):
        return None
    return (grammar, grammar.reads) if isinstance(grammar.reads, Patches) else None


def _holds_places(asks: AskWord) -> bool:
    """Return whether a row is the sum of an embedded patch and the position of this patch."""
    match asks:
        case Shift():
            return asks.place == "content"
        case Mask():
            return not asks.marks
    return asks.kind != "instruct"


def _differences(
    source: RunConfig, model: ModelConfig, sizes: EncoderSizes, key: Key
) -> Iterator[str]:
    """Yield reasons why the weights of `source` do not fit; after the first, others may raise."""
    found = _grammar_of_vit(source)
    if found is None:
        yield (
            f"is a run of {source.objective.name}; an encoder starts from a run of mae, or from one"
            " that `megavis import timm` or `vit` has made"
        )
        return
    grammar, patches = found
    if grammar.positions not in ("learned", "sincos", "learned_sincos"):
        yield f"has model.positions {grammar.positions}, and the encoder adds learned positions"
    if patches.embedding_norm:
        yield "normalises embedded patches, which the encoder does not"
    if patches.patch_size != (own := sizes.keys.patch_size):
        yield (
            f"has patches of {patches.patch_size} pixels, and the encoder of {own}"
            f" ({key('patch_size')})"
        )
    for field, name in _KEYS.items():
        there, here = getattr(source.model, field), getattr(model, field)
        if there != here:
            where = f" ({key(name)})" if name else ""
            yield f"has {field} {there}, and the encoder {here}{where}"
