"""Config keys of GVP (sections 3.2, 4.1 and 5 of the paper).

Legend: T patches, S condition tokens, K predicted groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import check_patches, check_tokens, check_vocabulary
from megavis.config.schema import ConfigIssue, NonNegative, ObjectiveConfig, Positive, RunConfig
from megavis.schedules.boundaries import Cut, boundaries_error, boundary_range, max_groups


class GVPConfig(ObjectiveConfig):
    """Config keys of GVP."""

    host_milliseconds: ClassVar[tuple[float, float] | None] = (2.3, 8.9)

    name: Literal["gvp"] = "gvp"
    variant: Literal["p2p", "p2d", "d2d"] = "p2p"
    """Input and predicted tokens: pixels (p) or ids of a discrete tokenizer (d)."""
    patch_size: Positive = 16
    """Side of a patch in pixels; an id represents one patch."""
    vocabulary_size: Annotated[int, Field(gt=1)] | None = None
    """Vocabulary size of the tokenizer; required by p2d and d2d."""
    tokenizer: str | None = None
    """Run folder of the tokenizer that encodes images as ids or features; d2d on ids shards needs
    none."""
    streams: Literal["two", "one"] = "two"
    """With `one`, each patch is predicted from the token before it, which lacks that patch's
    position: the row "+Causal Masks" of table 10."""
    order: Literal["random", "raster"] = "random"
    """z: a random permutation for each image, or raster order (table 3)."""
    segmentation: Cut = "mixed"
    """How groups are cut (section 3.2, appendix B); `given` uses `boundaries`."""
    num_groups: Positive = 20
    """K, the number of predicted groups."""
    boundaries: Annotated[tuple[int, ...], Field(strict=False)] | None = None
    """n_0 to n_{K-1} for `given`: the number of tokens up to the end of each group."""
    num_condition_tokens: NonNegative = 1
    """S, learned tokens for y_extra; 1 is a class token."""
    condition_size: Positive | None = None
    """Channels of the tokenizer's features, whose mean over an image is y_extra instead of learned
    tokens (appendix E); absent for learned tokens."""
    feature_order: Literal["raster", "drawn"] = "raster"
    """Order and groups of the tokens for features under the causal mask, on which the paper is
    silent: `raster` order with even groups up to their mean end in training, without random draws;
    or `drawn` for each image as in training, where probes vote over several draws. On the demo
    `raster` classifies 44 % of letters and `drawn` 34 %."""
    normalize_targets: bool = False
    """Standardise each target patch by its own mean and standard deviation, as in MAE."""

    def num_patches(self, config: RunConfig) -> int:
        """Return T."""
        return (config.data.image_size // self.patch_size) ** 2

    def bounds(self, config: RunConfig) -> tuple[int, int]:
        """Return the smallest n_0 and the largest n_{K-1} over all images."""
        count = self.num_patches(config)
        return boundary_range(self.segmentation, count, self.num_groups, self.boundaries)

    @property
    def no_images(self) -> str | None:
        """Why models of this config cannot generate images; None if they can."""
        faults = {
            "variant p2d reads patches and predicts ids": self.variant == "p2d",
            "condition_size is conditioned on the whole image": self.condition_size is not None,
            "streams one cannot predict tokens in any order": self.streams == "one",
        }
        fault = next((text for text, holds in faults.items() if holds), None)
        return fault and f"a model with objective.{fault}; train without it to generate"

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
            yield "objective.tokenizer", "must name the run folder of the tokenizer"
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
            text = "must be at least 1 with streams one, to predict the first patch"
            yield "objective.num_condition_tokens", text
        if (self.segmentation, self.num_groups) != ("fixed", num_patches):
            text = f"must be fixed with num_groups {num_patches} for streams one, one token a group"
            yield "objective.segmentation", text

    def _check_groups(self, num_patches: int) -> Iterator[ConfigIssue]:
        if (self.segmentation == "given") != (self.boundaries is not None):
            yield (
                "objective.boundaries",
                "must be given if and only if segmentation is given",
            )
        elif self.boundaries is not None:
            fault = boundaries_error(self.boundaries, num_patches)
            if fault:
                yield "objective.boundaries", fault
        elif self.segmentation != "given":
            most = max_groups(self.segmentation, num_patches)
            if self.num_groups > most:
                yield (
                    "objective.num_groups",
                    f"{self.num_groups} groups cannot be cut from {num_patches} patches with"
                    f" {self.segmentation} length; use at most {most}",
                )

    def _check_split(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check what splits sequences: the counts of all tokens, and of those of the head."""
        first, last = self.bounds(config)
        num_queries = self.num_patches(config) - first if self.streams == "two" else 0
        if config.classifies_only:
            last, num_queries = self.num_patches(config), 0
        num_tokens = self.num_condition_tokens + last + num_queries
        yield from check_tokens(
            config,
            num_tokens,
            num_queries,
            what=f"{num_tokens} tokens, {num_queries} of them queries,",
            remedy="change objective.num_condition_tokens",
        )
