"""The keys of MAE, and what must hold between them and the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from megavis.config.schema import Complaint, ObjectiveConfig, Positive, RunConfig, Section
from megavis.objectives.layout_checks import check_patches, check_tokens
from megavis.schedules.context_size import context_size


class DecoderConfig(Section):
    """Blocks above the encoder's, for pre-training alone (section 3, table 1)."""

    num_layers: Positive = 8
    """Blocks."""
    hidden_size: Positive = 512
    """Their width; 4 must divide it."""
    num_attention_heads: Positive = 16
    """Their attention heads."""


class MAEConfig(ObjectiveConfig):
    """The paper's own keys: types and ranges here, what joins them to other keys in `check`."""

    name: Literal["mae"] = "mae"
    patch_size: Positive = 16
    """Side of a patch in pixels."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the patches that the encoder does not see (section 3)."""
    normalize_targets: bool = True
    """Predict each patch standardised by itself (table 1d)."""
    class_token: bool = True
    """A learned token in front of the patches (section 3)."""
    decoder: DecoderConfig = DecoderConfig()
    """The second stack; its other keys are those of `model`."""

    def num_patches(self, config: RunConfig) -> int:
        """Return the patches of an image."""
        return (config.data.image_size // self.patch_size) ** 2

    def num_visible(self, config: RunConfig) -> int:
        """Return the patches that the encoder sees, at least one."""
        return context_size(self.num_patches(config), self.mask_ratio)

    def check(self, config: RunConfig) -> Iterator[Complaint]:
        """Want whole patches, some of them hidden, positions, and sizes that the layout divides."""
        yield from check_patches(config, self.patch_size)
        every, seen = self.num_patches(config), self.num_visible(config)
        if config.data.image_size >= self.patch_size and seen == every:
            text = f"{self.mask_ratio} of {every} patches hides none"
            yield "objective.mask_ratio", f"{text}; raise it, or lower objective.patch_size"
        if config.model.positions not in (None, "sincos", "learned"):
            text = f"{config.model.positions} does not reach the decoder; use sincos or learned"
            yield "model.positions", text
        counts = [seen + self.class_token, every + self.class_token]
        what = "{} tokens of the encoder and {} of the decoder".format(*counts)
        remedy = "change objective.mask_ratio or objective.class_token"
        yield from check_tokens(config, *counts, what=what, remedy=remedy)
        if config.finetune is not None and config.finetune.generative_weight:
            text = "wants patches hidden for the paper's own loss, and all seen for classes"
            yield "finetune.generative_weight", f"{text}; set it to 0"
        yield from self._check_decoder(config)

    def _check_decoder(self, config: RunConfig) -> Iterator[Complaint]:
        """Want heads that divide the width, and that the tensor group can share."""
        width, heads = self.decoder.hidden_size, self.decoder.num_attention_heads
        if width % heads or width % 4:
            text = f"{width} does not divide by 4 and by num_attention_heads {heads}"
            yield "objective.decoder.hidden_size", text
        tensor = config.parallel.tensor_model_parallel_size
        if heads % tensor:
            text = f"{heads} heads do not divide by tensor_model_parallel_size {tensor}"
            yield "objective.decoder.num_attention_heads", text
