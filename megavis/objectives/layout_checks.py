"""Complaints that papers share: sizes that neither the image nor the tensor group divides."""

from __future__ import annotations

from collections.abc import Iterator

from megavis.config.schema import Complaint, RunConfig


def check_patches(
    config: RunConfig, patch_size: int, key: str = "patch_size"
) -> Iterator[Complaint]:
    """Want whole patches.

    Args:
        config: the run's.
        patch_size: side of a patch in pixels.
        key: of the objective, that says so.
    """
    side = config.data.image_size
    if side % patch_size:
        yield f"objective.{key}", f"{patch_size} does not divide data.image_size {side}"


def check_vocabulary(config: RunConfig, vocabulary_size: int) -> Iterator[Complaint]:
    """Want logits that the tensor group can share."""
    tensor = config.parallel.tensor_model_parallel_size
    if vocabulary_size % tensor:
        text = f"{vocabulary_size} does not divide by tensor_model_parallel_size {tensor}"
        yield "objective.vocabulary_size", text


def check_tokens(
    config: RunConfig, *counts: int, what: str, remedy: str = "set it to false"
) -> Iterator[Complaint]:
    """Want tokens that sequence parallelism can share, where it is on.

    Args:
        config: the run's.
        counts: numbers of tokens, each of which is split.
        what: the tokens in words, with their number.
        remedy: what would be right.
    """
    tensor = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and any(count % tensor for count in counts):
        text = f"{what} do not divide by tensor_model_parallel_size {tensor}; {remedy}"
        yield "parallel.sequence_parallel", text
