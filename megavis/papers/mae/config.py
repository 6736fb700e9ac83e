"""Config keys of MAE, and checks against other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megavis.composition.shared_keys import DecoderConfig, check_hiding, check_patches
from megavis.config.schema import ConfigIssue, ObjectiveConfig, Positive, RunConfig


class MAEConfig(ObjectiveConfig):
    """Config keys of MAE: types and ranges here, checks against other keys in `check`."""

    host_milliseconds: ClassVar[tuple[float, float] | None] = (1.7, 8.5)

    name: Literal["mae"] = "mae"
    patch_size: Positive = 16
    """Side of a patch in pixels."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the patches hidden from the encoder (section 3)."""
    normalize_targets: bool = True
    """Standardise each target patch by its own mean and standard deviation (table 1d)."""
    class_token: bool = True
    """Prepend a learned token to the patches (section 3)."""
    tokens_decay: bool = True
    """Apply weight decay to class and mask token in pre-training, as the released code does since
    they have three dimensions there; not stated in the paper. They never decay in fine-tuning."""
    decoder: DecoderConfig = DecoderConfig()
    """The decoder, used only in pretraining (section 3, table 1)."""

    @property
    def num_further_blocks(self) -> int:
        """Blocks of the decoder."""
        return self.decoder.num_layers

    def num_patches(self, config: RunConfig) -> int:
        """Return the number of patches of an image."""
        return (config.data.image_size // self.patch_size) ** 2

    def check(self, config: RunConfig) -> Iterator[ConfigIssue]:
        """Check that patches tile the image, some are hidden, and the layout divides sizes."""
        yield from check_patches(config, self.patch_size)
        yield from check_hiding(
            config,
            self.num_patches(config),
            self.mask_ratio,
            class_token=self.class_token,
            ratio_key="objective.mask_ratio",
            class_key="objective.class_token",
        )
        yield from self.decoder.check(config, "objective.decoder")
