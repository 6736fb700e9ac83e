"""Sizes of the networks and lengths of the runs that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from megavis.config.schema import TrainingConfig


@dataclass(frozen=True)
class Sizes:
    """Sizes shared by all comparisons.

    Attributes:
        layers, width, heads: sizes of the network; the decoder's are MAE's.
        image_size: side of the images; iGPT's is that of its shards.
        patch_size: side of a patch; iGPT reads single pixels.
        batch_size: images per step, an even number.
        steps: length of the run.
        warmup: steps of linear warm-up.
        rate: peak learning rate.
        seed: seed of weights, order of samples, and draws.
        control: train a second peer too, whose first weights differ by one rounding.
    """

    layers: int = 6
    width: int = 192
    heads: int = 6
    decoder_layers: int = 2
    decoder_width: int = 128
    decoder_heads: int = 4
    image_size: int = 32
    patch_size: int = 4
    batch_size: int = 32
    steps: int = 100
    warmup: int = 10
    rate: float = 1.5e-4
    seed: int = 0
    control: bool = False

    def training(self) -> TrainingConfig:
        """Return the section `training` of a run."""
        return TrainingConfig(steps=self.steps, batch_size=self.batch_size)
