"""Config keys of DARL (sections 3 and 4 of the paper, tables 2 and 7, appendix B.2).

Legend: T patches of an image, k side of a block of patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import check_patches, check_tokens, check_vocabulary
from megavis.config.schema import ConfigIssue, ObjectiveConfig, Positive, RunConfig
from megavis.config.section import Above0, AtLeast0, DecoderKind, OrderKind


class DARLConfig(ObjectiveConfig):
    """Config keys of DARL."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset({"sampling_steps", "sampling_temperature"})

    host_milliseconds: ClassVar[tuple[float, float] | None] = (2.6, 8.8)

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
    """With `mse`: standardise each target patch by its own mean and deviation (table 14)."""
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

    def grid_side(self, config: RunConfig) -> int:
        """Return √T."""
        return config.data.image_size // self.patch_size

    @property
    def no_images(self) -> str | None:
        """Why models of this config cannot generate images; None if they can."""
        if self.loss == "ids" and self.inputs == "pixels":
            what = "loss ids the model reads patches and predicts ids"
        elif self.loss != "ids" and self.inputs == "ids":
            what = "inputs ids the model reads ids and predicts pixels"
        else:
            return None
        return f"with objective.{what}, so it cannot continue from its own samples"

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that patches and blocks divide, and that keys are compatible."""
        faults = [*check_patches(config, self.patch_size)]
        if faults:
            yield from faults
            return
        yield from self._check_order(self.grid_side(config))
        yield from self._check_loss()
        yield from self._check_ids(config)
        if config.model.positions is None and config.model.head_size % 4:
            text = "rope_2d, the default here, needs a head width divisible by 4, not"
            yield "model.positions", f"{text} {config.model.head_size}"
        yield from self._check_split(config)

    def _check_split(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check the token count under sequence and context parallelism."""
        count = self.grid_side(config) ** 2
        what = f"{count} patches"
        if config.classifies_only:
            # The last patch is an input too.
            count, what = count + 1, f"start token and {count} patches"
        yield from check_tokens(config, count, what=what)

    def _check_order(self, grid_side: int) -> Iterator[ConfigIssue]:
        if self.order in ("nested_raster", "round_robin") and grid_side % self.order_block:
            yield (
                "objective.order_block",
                f"{self.order_block} does not divide a grid of {grid_side} × {grid_side} patches",
            )
        if self.order == "random" and not self.two_streams:
            yield (
                "objective.two_streams",
                "must be true for order random, so that a token has the position that it predicts",
            )

    def _check_loss(self) -> Iterator[ConfigIssue]:
        if self.loss == "mse" and self.decoder_kind == "transformer":
            yield (
                "objective.decoder",
                "transformer pairs the backbone's output with a noisy patch, and loss mse has none;"
                " use linear or mlp, or loss diffusion",
            )
        if self.loss != "mse" and self.normalize_targets:
            yield (
                "objective.normalize_targets",
                f"belongs to loss mse; set it to false for {self.loss}",
            )

    def _check_ids(self, config: RunConfig) -> Iterator[ConfigIssue]:
        given = {"tokenizer": self.tokenizer, "vocabulary_size": self.vocabulary_size}
        for key, value in given.items():
            if (value is None) == ("ids" in (self.loss, self.inputs)):
                text = "must be given" if value is None else "leave it out"
                yield f"objective.{key}", f"belongs to loss ids and inputs ids: {text}"
        if self.loss == "ids" and self.decoder_kind != "linear":
            yield "objective.decoder", f"{self.decoder} predicts pixels; leave it out for loss ids"
        if self.vocabulary_size is not None:
            yield from check_vocabulary(config, self.vocabulary_size)
