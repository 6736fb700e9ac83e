"""DARL: Denoising Autoregressive Representation Learning (Li, Bornschein, Chen, 2024).

Each patch of an image is predicted from those before it: its pixels, by squared error or by a
denoising decoder conditioned on the backbone's output (section 3), or its id in a frozen tokenizer
(appendix B.4). Patches are corrupted independently, each with its own γ.

In the two streams, queries attend to the content of patches before theirs, as in appendix A.5;
section 4.4 lets them attend to "previous query and content tokens".

Legend: T patches of an image, k side of a block of patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.schema import ConfigIssue, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0, DecoderKind, OrderKind
from megavis.grammar.grammar import Grammar
from megavis.grammar.paper import PaperConfig, Renamed
from megavis.grammar.words import (
    AnyDensity,
    AnyTokens,
    Categorical,
    Diffusion,
    Ids,
    OneByOne,
    Patches,
    Query,
    Shift,
    SquaredError,
)


class DARLConfig(PaperConfig):
    """Config keys of DARL."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset({"sampling_steps", "sampling_temperature"})

    names: ClassVar[Mapping[str, str | Renamed]] = {
        "predicts": Renamed("loss", "set it and objective.inputs to one kind"),
        "asks.place": Renamed("two_streams", "set it to true"),
        "density.normalize": "normalize_targets",
    }

    name: Literal["darl"] = "darl"
    patch_size: Positive = 16
    """Side of a patch in pixels."""
    loss: Literal["mse", "diffusion", "ids"] = "mse"
    """Squared error of the patch (`mse`), of the denoised patch (`diffusion`, section 3.2), or the
    cross-entropy of its id in a frozen tokenizer (`ids`, table 16)."""
    inputs: Literal["pixels", "ids"] = "pixels"
    """Input of each patch: its pixels, or its id in a frozen tokenizer (table 16)."""
    tokenizer: str | None = None
    """With `ids`: run folder of the tokenizer, whose ids represent `patch_size`² pixels each."""
    vocabulary_size: Annotated[int, Field(gt=1)] | None = None
    """With `ids`: vocabulary size of the tokenizer."""
    normalize_targets: bool = False
    """With `mse`: standardise each target patch by its mean and standard deviation (table 14)."""
    order: OrderKind = "raster"
    """Order in which patches are predicted (section 4.4)."""
    order_block: Positive = 2
    """k, for `nested_raster` and `round_robin`: blocks of k × k patches."""
    two_streams: bool = False
    """Predict each patch from a query token with its position (appendix A.5); required by a random
    order."""
    decoder: DecoderKind | None = None
    """Decoder of the backbone's output (table 2); defaults to `linear` for mse and to a
    `transformer` over pairs of output and noisy patch for diffusion."""
    decoder_layers: Positive = 1
    """Layers of an `mlp` or blocks of a `transformer`; ignored by `linear`."""
    noise_a: Above0 = 0.03
    """With `diffusion`: a of γ ~ Beta(a, b); γ near 0 is nearly pure noise."""
    noise_b: Above0 = 1.0
    """With `diffusion`: b of γ ~ Beta(a, b)."""
    predicts: Literal["clean", "noise"] = "clean"
    """With `diffusion`: predict the clean patch x⁰, or the noise ε."""
    condition_on_gamma: bool = False
    """With `diffusion`: append γ to the noisy patch as a channel (section 4.1)."""
    sampling_steps: Positive = 1000
    """With `diffusion`: denoising steps in generation (appendix F)."""
    sampling_temperature: AtLeast0 = 1.0
    """With `diffusion`: multiplies the noise of each step. 1 is the paper's process; lower values,
    an extension, give more likely images with less texture."""

    @property
    def decoder_kind(self) -> DecoderKind:
        """The configured decoder, or the default of the loss."""
        return self.decoder or ("transformer" if self.loss == "diffusion" else "linear")

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield keys that the loss needs or does not use."""
        if self.loss == "mse" and self.decoder_kind == "transformer":
            text = "transformer pairs outputs with noisy patches, which loss mse does not have"
            yield "objective.decoder", f"{text}; use linear or mlp, or loss diffusion"
        if self.loss != "mse" and self.normalize_targets:
            text = f"belongs to loss mse; set it to false for {self.loss}"
            yield "objective.normalize_targets", text
        given = {"tokenizer": self.tokenizer, "vocabulary_size": self.vocabulary_size}
        for key, value in given.items():
            if (value is None) == ("ids" in (self.loss, self.inputs)):
                text = "must be given" if value is None else "leave it out"
                yield f"objective.{key}", f"belongs to loss ids and inputs ids: {text}"
        if self.loss == "ids" and self.decoder_kind != "linear":
            yield "objective.decoder", f"{self.decoder} predicts pixels; leave it out for loss ids"

    def grammar(self, run: RunConfig) -> Grammar:
        """Return one patch at a time (section 3.1), or queries of two streams (appendix A.5).

        Features also read the last patch, "which the model doesn't need during pre-training"
        (section 4.1). Positions are decomposed rotary ones (section 3.4).
        """
        patches: AnyTokens = Patches(patch_size=self.patch_size)
        reads = predicts = patches
        if self.vocabulary_size is not None:
            size, name = self.vocabulary_size, self.tokenizer
            ids = Ids(patch_size=self.patch_size, vocabulary_size=size, tokenizer=name)
            reads = ids if self.inputs == "ids" else patches
            predicts = ids if self.loss == "ids" else patches
        return Grammar(
            reads=reads,
            predicts=None if predicts == reads else predicts,
            schedule=OneByOne(order=self.order, order_block=self.order_block),
            asks=Query() if self.two_streams else Shift(place="content"),
            density=self._density(),
            positions=run.model.positions or "rope_2d",
        )

    def _density(self) -> AnyDensity:
        """Return squared error or diffusion of pixels (sections 3.2, 3.3), or ids."""
        if self.loss == "ids":
            return Categorical()
        if self.loss == "mse":
            assert self.decoder_kind != "transformer"
            return SquaredError(
                normalize=self.normalize_targets,
                decoder=self.decoder_kind,
                decoder_layers=self.decoder_layers,
            )
        return Diffusion(
            decoder=self.decoder_kind,
            decoder_layers=self.decoder_layers,
            noise_a=self.noise_a,
            noise_b=self.noise_b,
            predicts=self.predicts,
            condition_on_gamma=self.condition_on_gamma,
            sampling_steps=self.sampling_steps,
            sampling_temperature=self.sampling_temperature,
        )
