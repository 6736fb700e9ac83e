"""The config keys of GVP (sections 3.2, 4.1 and 5 of the paper).

Legend: T patches, S condition tokens, K predicted groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megavis.composition.shared_keys import check_patches, check_tokens, check_vocabulary
from megavis.config.schema import ConfigIssue, NonNegative, ObjectiveConfig, Positive, RunConfig
from megavis.schedules.boundaries import Cut, bounds_of, fault_of_boundaries, most_groups


class GVPConfig(ObjectiveConfig):
    """The keys of GVP."""

    name: Literal["gvp"] = "gvp"
    variant: Literal["p2p", "p2d", "d2d"] = "p2p"
    """What is read and what is predicted: pixels (p) or ids of a discrete tokenizer (d)."""
    patch_size: Positive = 16
    """Side of a token in pixels: of a patch, and of the pixels of an id."""
    vocabulary_size: Annotated[int, Field(gt=1)] | None = None
    """Ids of the tokenizer; p2d and d2d need it."""
    tokenizer: str | None = None
    """Run folder of the tokenizer that makes ids or features of images; d2d on ids shards needs
    none."""
    streams: Literal["two", "one"] = "two"
    """One stream predicts each patch from the token before it, which does not know where that patch
    stands: the row "+Causal Masks" of table 10."""
    order: Literal["random", "raster"] = "random"
    """z: a permutation of its own for each image, or rows from top to bottom (table 3)."""
    segmentation: Cut = "mixed"
    """How groups are cut (section 3.2, appendix B); `given`: by `boundaries`."""
    num_groups: Positive = 20
    """K, groups that are predicted."""
    boundaries: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """n_0 to n_{K-1} for `given`: how many tokens, in order, precede the end of each group."""
    num_condition_tokens: NonNegative = 1
    """S, learned tokens in place of y_extra; 1 is a class token."""
    condition_size: Positive | None = None
    """Numbers of the tokenizer's features, whose mean over an image is y_extra in place of a class
    token (appendix E); absent for learned tokens."""
    normalize_targets: bool = False
    """Predict each patch standardised by its own mean and deviation, as MAE does."""

    def num_patches(self, config: RunConfig) -> int:
        """Return T."""
        return (config.data.image_size // self.patch_size) ** 2

    def bounds(self, config: RunConfig) -> tuple[int, int]:
        """Return the smallest n_0 and the largest n_{K-1} that any image can have."""
        count = self.num_patches(config)
        return bounds_of(self.segmentation, count, self.num_groups, self.boundaries)

    @property
    def no_images(self) -> str | None:
        """Models must read what they predict, and can be asked for any token."""
        faults = {
            "variant p2d reads patches and predicts ids": self.variant == "p2d",
            "condition_size knows the whole image": self.condition_size is not None,
            "streams one does not know which token is asked for": self.streams == "one",
        }
        fault = next((text for text, holds in faults.items() if holds), None)
        return fault and f"a model with objective.{fault}; pictures need one trained without"

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that patches tile the image, and that groups fit them."""
        faults = [*check_patches(config, self.patch_size)]
        if faults:
            yield from faults
            return
        if config.model.positions is None and config.model.hidden_size % 4:
            yield (
                "model.hidden_size",
                f"{config.model.hidden_size} is not divisible by 4, as sin-cos positions need",
            )
        yield from self._check_ids(config)
        yield from self._check_condition()
        yield from self._check_streams(self.num_patches(config))
        faults = [*self._check_groups(self.num_patches(config))]
        yield from faults
        if not faults:
            yield from self._check_split(config)

    def _check_ids(self, config: RunConfig) -> Iterator[ConfigIssue]:
        if self.variant == "p2p":
            unused = {
                "vocabulary_size": self.vocabulary_size is not None,
                "tokenizer": self.tokenizer is not None and self.condition_size is None,
            }
            for key in [name for name, given in unused.items() if given]:
                yield f"objective.{key}", "belongs to the variants p2d and d2d; leave it out"
        elif self.vocabulary_size is None:
            text = f"must be given for {self.variant}: how many ids the tokenizer has"
            yield "objective.vocabulary_size", text
        else:
            yield from check_vocabulary(config, self.vocabulary_size)
        if self.variant == "p2d" and self.tokenizer is None:
            yield "objective.tokenizer", "must name the run folder of what makes the ids"
        if self.variant != "p2p" and self.normalize_targets:
            text = f"is for pixels, and {self.variant} predicts ids; set it to false"
            yield "objective.normalize_targets", text

    def _check_condition(self) -> Iterator[ConfigIssue]:
        if self.condition_size is None:
            return
        if self.tokenizer is None:
            yield "objective.tokenizer", "must name the run folder whose features are the condition"
        if self.num_condition_tokens != 1:
            text = "must be 1 with condition_size: the mean of the features is one token"
            yield "objective.num_condition_tokens", text
        if self.variant != "p2p":
            yield "objective.condition_size", "belongs to the variant p2p, as in appendix E"

    def _check_streams(self, num_patches: int) -> Iterator[ConfigIssue]:
        if self.streams == "two":
            return
        if self.variant != "p2p":
            yield "objective.streams", f"one is for variant p2p, not {self.variant}"
        if not self.num_condition_tokens:
            text = "must be at least 1 with streams one: something predicts the first patch"
            yield "objective.num_condition_tokens", text
        if (self.segmentation, self.num_groups) != ("fixed", num_patches):
            text = f"must be fixed with num_groups {num_patches}: one stream predicts one by one"
            yield "objective.segmentation", text

    def _check_groups(self, num_patches: int) -> Iterator[ConfigIssue]:
        if (self.segmentation == "given") != (self.boundaries is not None):
            yield (
                "objective.boundaries",
                "belongs to segmentation given, and to it alone: set both or neither",
            )
        elif self.boundaries is not None:
            fault = fault_of_boundaries(self.boundaries, num_patches)
            if fault:
                yield "objective.boundaries", fault
        elif self.segmentation != "given":
            most = most_groups(self.segmentation, num_patches)
            if self.num_groups > most:
                yield (
                    "objective.num_groups",
                    f"{self.num_groups} groups cannot be cut from {num_patches} patches with"
                    f" {self.segmentation} length; use at most {most}",
                )

    def _check_split(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Sequence parallelism splits all tokens, and those that the head reads."""
        first, last = self.bounds(config)
        num_queries = self.num_patches(config) - first if self.streams == "two" else 0
        num_tokens = self.num_condition_tokens + last + num_queries
        yield from check_tokens(
            config,
            num_tokens,
            num_queries,
            what=f"{num_tokens} tokens, {num_queries} of them queries,",
            remedy="change objective.num_condition_tokens, or set it to false",
        )
