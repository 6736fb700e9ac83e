"""The words of a paper as keys: any combination of tokens, schedule, asking, density, condition.

Each word is a section with a `kind`, which says what other keys it has. What goes together is
checked here, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.config.choices import DecoderKind, OrderKind, ScaleActivation
from megavis.config.schema import (
    Complaint,
    Fraction,
    NonNegative,
    ObjectiveConfig,
    Positive,
    RunConfig,
)
from megavis.config.section import Above0, AtLeast0, Section
from megavis.objectives.layout_checks import check_tokens
from megavis.schedules.boundaries import most_groups


class PaletteTokens(Section):
    """Palette ids, a token a pixel."""

    kind: Literal["palette"]
    vocabulary_size: Annotated[int, Field(gt=1)] = 512
    """Colours of the palette."""

    def side(self, image_size: int) -> int:
        """Return the tokens of a row."""
        return image_size


class PatchTokens(Section):
    """Square patches of standardised pixels."""

    kind: Literal["patches"]
    patch_size: Positive = 16
    """Side of a patch in pixels."""

    def side(self, image_size: int) -> int:
        """Return the tokens of a row."""
        return image_size // self.patch_size


class IdTokens(Section):
    """Ids of a trained codebook."""

    kind: Literal["ids"]
    vocabulary_size: Annotated[int, Field(gt=1)]
    """Entries of the codebook."""
    patch_size: Positive = 16
    """Side in pixels of what an id stands for."""
    tokenizer: str | None = None
    """Run folder of what makes ids of images and images of ids; ids shards need none to train."""

    def side(self, image_size: int) -> int:
        """Return the tokens of a row."""
        return image_size // self.patch_size


class LatentTokens(Section):
    """Latents of a VAE, drawn from its posterior."""

    kind: Literal["latents"]
    channels: Positive = 16
    """Numbers of a latent."""
    patch_size: Positive = 16
    """Side in pixels of what a latent stands for."""
    tokenizer: str | None = None
    """Run folder of the VAE, which encodes images and decodes samples; latents shards need none to
    train."""

    def side(self, image_size: int) -> int:
        """Return the tokens of a row."""
        return image_size // self.patch_size


AnyTokens = PaletteTokens | PatchTokens | IdTokens | LatentTokens


class OneByOneSchedule(Section):
    """One token after the other."""

    kind: Literal["one_by_one"]
    order: OrderKind = "raster"
    """The order of the tokens; `random`: one for each image."""
    order_block: Positive = 2
    """Side of a block in tokens, for `nested_raster` and `round_robin`."""
    prefix: NonNegative = 0
    """Tokens, first in the order, that are given: they see each other, and none is predicted."""


class MaskedSchedule(Section):
    """Each token hidden with the same probability."""

    kind: Literal["masked"]
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """That probability."""


class RoundsSchedule(Section):
    """A share of the tokens hidden, drawn for each image; drawn in rounds, as MaskGIT does."""

    kind: Literal["rounds"]
    least_masking: Fraction = 0.0
    """The share is cos(π/2 · u), u uniform in [0, 1 - this)."""


class GroupsSchedule(Section):
    """Group after group, each image in an order of its own."""

    kind: Literal["groups"]
    length: Literal["fixed", "random", "mixed"] = "random"
    """How groups are cut."""
    num_groups: Positive = 20
    """Groups that are predicted; the one before them is given."""


AnySchedule = OneByOneSchedule | MaskedSchedule | RoundsSchedule | GroupsSchedule


class ShiftAsking(Section):
    """A row holds the token before the one that it predicts."""

    kind: Literal["shift"]
    place: Literal["asked", "content", "both"] = "asked"
    """Whose position a row has: that of the token that it predicts, of the one that it holds, or
    both, each from a table of its own."""


class MaskAsking(Section):
    """A row for each token, with a filler where one is hidden."""

    kind: Literal["mask"]
    filler: Literal["vector", "zeros"] = "vector"
    """What stands for a hidden token: a learned vector, or nothing."""


class QueryAsking(Section):
    """Rows without a token ask for what is predicted; nobody sees them."""

    kind: Literal["query"]


AnyAsking = ShiftAsking | MaskAsking | QueryAsking


class CategoricalDensity(Section):
    """A logit for each id."""

    kind: Literal["categorical"]


class SquaredErrorDensity(Section):
    """A Gaussian of unit variance."""

    kind: Literal["squared_error"]
    normalize: bool = False
    """Standardise each target by its own mean and deviation; nothing can be drawn then."""


class MixtureDensity(Section):
    """A mixture of Gaussians with diagonal covariances."""

    kind: Literal["mixture"]
    num_components: Positive = 16
    """Gaussians of the mixture."""
    scale_activation: ScaleActivation = "squareplus"
    """From an output to a scale."""
    scale_floor: Above0 = 1e-6
    """Smallest scale."""
    head_std: AtLeast0 = 0.02
    """Deviation of the last matrix at the start."""


class DiffusionDensity(Section):
    """A decoder that takes noise from a token."""

    sampling_keys: ClassVar[frozenset[str]] = frozenset({"sampling_steps", "sampling_temperature"})

    kind: Literal["diffusion"]
    decoder: DecoderKind = "transformer"
    """What reads the backbone's output and the noisy token."""
    decoder_layers: Positive = 1
    """Its layers; `linear` has none."""
    noise_a: Above0 = 0.03
    """a of γ ~ Beta(a, b), the share of the signal's power."""
    noise_b: Above0 = 1.0
    """b of it."""
    predicts: Literal["clean", "noise"] = "clean"
    """The token, or the noise that was added."""
    condition_on_gamma: bool = False
    """The decoder knows γ."""
    sampling_steps: Positive = 1000
    """From noise to a token."""
    sampling_temperature: AtLeast0 = 1.0
    """Multiplies the noise of each step."""


AnyDensity = CategoricalDensity | SquaredErrorDensity | MixtureDensity | DiffusionDensity


class NoCondition(Section):
    """Nothing."""

    kind: Literal["none"]


class ClassCondition(Section):
    """The class of the image."""

    kind: Literal["class"]
    num_classes: Positive
    """Classes of the labels."""
    dropout: Fraction = 0.1
    """Probability that training shows no class; 0: guidance and features are refused."""


AnyCondition = NoCondition | ClassCondition


class ComposeConfig(ObjectiveConfig):
    """The keys of a composition."""

    name: Literal["compose"] = "compose"
    reads: Annotated[AnyTokens, Field(discriminator="kind")]
    """What goes in."""
    predicts: Annotated[AnyTokens | None, Field(discriminator="kind")] = None
    """What comes out; what goes in when absent."""
    schedule: Annotated[AnySchedule, Field(discriminator="kind")]
    """What is known when a token is predicted."""
    asks: Annotated[AnyAsking, Field(discriminator="kind")]
    """How a token asks to be predicted."""
    density: Annotated[AnyDensity, Field(discriminator="kind")]
    """How it is predicted, scored and drawn."""
    condition: Annotated[AnyCondition, Field(discriminator="kind")] = NoCondition(kind="none")
    """What else is known of an image."""

    @property
    def predicted(self) -> AnyTokens:
        """What comes out."""
        return self.predicts or self.reads

    @property
    def missing_null_label(self) -> str | None:
        """The probability of dropping the class, where that is the condition and it is 0."""
        has_none = isinstance(self.condition, ClassCondition) and not self.condition.dropout
        return "objective.condition.dropout" if has_none else None

    @property
    def no_images(self) -> str | None:
        """What comes out must be what goes in, and the schedule say what is drawn when."""
        if self.predicts is not None:
            return (
                "a model with objective.predicts cannot go on from what it has drawn: it reads"
                f" {self.reads.kind}"
            )
        if self.schedule.kind == "masked":
            return (
                "objective.schedule masked says not what is drawn when; train with rounds to draw"
            )
        return None

    def check(self, config: RunConfig) -> Iterator[Complaint]:
        """Yield a sentence for each combination that makes no sense."""
        sizes = [*self._check_sizes(config)]
        yield from sizes
        yield from self._check_asking(config)
        yield from self._check_density()
        if not sizes:
            yield from self._check_split(config)

    def _check_sizes(self, config: RunConfig) -> Iterator[Complaint]:
        size, sides = config.data.image_size, []
        tensor = config.parallel.tensor_model_parallel_size
        for key, tokens in (("reads", self.reads), ("predicts", self.predicts)):
            if tokens is None:
                continue
            if not isinstance(tokens, PaletteTokens) and size % tokens.patch_size:
                text = f"{tokens.patch_size} does not divide data.image_size {size}"
                yield f"objective.{key}.patch_size", text
            if isinstance(tokens, PaletteTokens | IdTokens) and tokens.vocabulary_size % tensor:
                text = f"{tokens.vocabulary_size} does not divide by tensor_model_parallel_size"
                yield f"objective.{key}.vocabulary_size", f"{text} {tensor}"
            sides.append(tokens.side(size))
        if len(set(sides)) > 1:
            text = f"makes {sides[1]}² tokens of an image where objective.reads makes {sides[0]}²"
            yield "objective.predicts", text
        yield from self._check_schedule(sides[0])

    def _check_schedule(self, side: int) -> Iterator[Complaint]:
        schedule, count = self.schedule, side**2
        if isinstance(schedule, GroupsSchedule):
            most = most_groups(schedule.length, count)
            if schedule.num_groups > most:
                text = f"{schedule.num_groups} groups cannot be cut from {count} tokens"
                yield "objective.schedule.num_groups", f"{text}; use at most {most}"
        if not isinstance(schedule, OneByOneSchedule):
            return
        if schedule.order in ("nested_raster", "round_robin") and side % schedule.order_block:
            text = f"{schedule.order_block} does not divide a grid of {side} × {side} tokens"
            yield "objective.schedule.order_block", text
        if schedule.prefix >= count:
            text = f"{schedule.prefix} leaves nothing to predict of {count} tokens"
            yield "objective.schedule.prefix", text

    def _check_asking(self, config: RunConfig) -> Iterator[Complaint]:
        schedule, asks = self.schedule, self.asks
        fitting = {
            "shift": ("one_by_one",),
            "mask": ("masked", "rounds"),
            "query": ("one_by_one", "groups"),
        }[asks.kind]
        if schedule.kind not in fitting:
            yield (
                "objective.asks.kind",
                f"{asks.kind} goes with schedule {' or '.join(fitting)}, not {schedule.kind}",
            )
            return
        positions = config.model.positions or "learned"
        if isinstance(schedule, OneByOneSchedule):
            yield from self._check_places(schedule, positions)
        if isinstance(asks, MaskAsking) and self.condition.kind == "class":
            text = "class stands in place of a first token, or before queries; asks is mask"
            yield "objective.condition.kind", text
        if asks.kind != "shift" and positions == "none":
            text = f"none tells no place: all tokens that {asks.kind} asks for would look alike"
            yield "model.positions", f"{text}; use another"

    def _check_places(self, schedule: OneByOneSchedule, positions: str) -> Iterator[Complaint]:
        asks = self.asks
        place = asks.place if isinstance(asks, ShiftAsking) else ""
        if place in ("asked", "content") and schedule.order == "random":
            missing = "stands" if place == "asked" else "is asked for"
            yield (
                "objective.asks.place",
                f"{place} does not say where the {'held' if place == 'asked' else 'next'} token"
                f" {missing}, which differs by image in order random; use both, or kind query",
            )
        if place == "both" and positions not in ("learned", "sincos"):
            text = f"{positions} cannot add two places to a row; use learned or sincos"
            yield "model.positions", text
        if schedule.prefix and place != "content":
            text = "a prefix that sees itself wants asks of kind shift with place content"
            yield "objective.schedule.prefix", text

    def _check_density(self) -> Iterator[Complaint]:
        predicted, density = self.predicted, self.density
        are_ids = isinstance(predicted, PaletteTokens | IdTokens)
        if are_ids != isinstance(density, CategoricalDensity):
            fitting = "categorical" if are_ids else "squared_error, mixture or diffusion"
            yield (
                "objective.density.kind",
                f"{density.kind} cannot predict {predicted.kind}; use {fitting}",
            )
        if isinstance(predicted, PaletteTokens) and predicted is not self.reads:
            yield "objective.predicts.kind", "palette ids can be predicted from themselves alone"
        if isinstance(self.predicts, IdTokens) and self.predicts.tokenizer is None:
            text = "must name the run folder of what makes the ids of images"
            yield "objective.predicts.tokenizer", text
        if isinstance(self.reads, PaletteTokens) and predicted is not self.reads:
            yield "objective.reads.kind", "palette shards hold no images to predict others from"

    def _check_split(self, config: RunConfig) -> Iterator[Complaint]:
        """Sequence parallelism splits all rows, and those that the head reads."""
        rows = count = self.reads.side(config.data.image_size) ** 2
        if isinstance(self.asks, QueryAsking):
            last = count - isinstance(self.schedule, OneByOneSchedule)
            rows = 1 + (self.condition.kind == "class") + last + count
        yield from check_tokens(config, rows, count, what=f"{rows} rows")
