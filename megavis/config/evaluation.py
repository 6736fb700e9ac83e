"""The config section for evaluating checkpoints during training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megavis.config.section import Above0, AtLeast0, Positive, Section


class EvaluationConfig(Section):
    """Evaluation during training: a separate process measures checkpoints as they appear."""

    what: Annotated[
        tuple[Literal["loss", "probe", "neighbors", "samples", "frechet"], ...],
        Field(strict=False),
    ] = ("loss", "probe")
    """Validation loss, linear probe, nearest neighbours, an image grid, Fréchet distance."""
    every: Positive = 1
    """Only checkpoints whose step is a multiple of this, and the last one."""
    train_images: Positive = 2000
    """Training images that classifiers are fitted on."""
    validation_images: Positive = 1000
    """Held-out images that are measured."""
    reference: str | None = None
    """For `frechet`: statistics of real images, as `megavis evaluate statistics` writes them."""
    inception: str | None = None
    """For `frechet`: a file of Inception's weights, for FID."""
    network: Literal["efficientnet-lite0"] | None = None
    """For `frechet`: another network."""
    num_samples: Annotated[int, Field(ge=2)] = 1000
    """For `frechet`: images that are drawn of each checkpoint."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where; on cuda it shares a GPU with training."""
    threads: Positive = 1
    """Threads of the process."""
    interval: Above0 = 5.0
    """Seconds between two looks for a new checkpoint."""
    finish_within: AtLeast0 = 600.0
    """Seconds that the end of training waits for the last checkpoint's measures."""
