"""The config section for evaluating checkpoints during training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megavis.config.section import Above0, AtLeast0, Positive, Section


class EvaluationConfig(Section):
    """Evaluation during training: a separate process evaluates checkpoints as they appear."""

    what: Annotated[
        tuple[Literal["loss", "probe", "neighbors", "samples", "frechet"], ...], Field(strict=False)
    ] = ("loss", "probe")
    """Validation loss, linear probe, nearest neighbours, an image grid, Fréchet distance."""
    every: Positive = 1
    """Evaluate only checkpoints whose step is a multiple of this, and the last one."""
    train_images: Positive = 2000
    """Training images for fitting classifiers."""
    validation_images: Positive = 1000
    """Held-out images to evaluate on."""
    reference: str | None = None
    """For `frechet`: statistics of real images, written by `megavis evaluate statistics`."""
    inception: str | None = None
    """For `frechet`: a file with Inception's weights, for FID."""
    network: Literal["efficientnet-lite0"] | None = None
    """For `frechet`: another network."""
    num_samples: Annotated[int, Field(ge=2)] = 1000
    """For `frechet`: images to generate per checkpoint."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device; cuda shares a GPU with training."""
    threads: Positive = 1
    """Threads of the process."""
    interval: Above0 = 5.0
    """Seconds between polls for a new checkpoint."""
    finish_within: AtLeast0 = 600.0
    """Seconds that training waits at its end for the evaluation of the last checkpoint."""
