"""Open what a command evaluates: a run, shards in its form, held-out images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megavis.commands.quiet import quietly
from megavis.config.errors import UserError
from megavis.data.codecs.transforms import evaluation_transform
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.features import identity_of_network
from megavis.notebook import Run
from megavis.parallel.context import close_context, current_context

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
"""Of the network's weights and activations, by the value of `--precision`."""


@contextlib.contextmanager
def job_closed() -> Iterator[None]:
    """Close the job that opening a run created, also after an error."""
    try:
        yield
    finally:
        if current_context() is not None:
            close_context()


def open_run(
    folder: Path,
    *,
    step: int | None,
    device: str | None = None,
    precision: str = "float32",
    image_size: int | None = None,
) -> Run:
    """Open a run, silencing libraries."""
    with quietly():
        return Run.open(
            folder, step=step, device=device, dtype=DTYPES[precision], image_size=image_size
        )


def network_identity(opened: Run, *, seed: int | None = None) -> Mapping[str, Any]:
    """Return what identifies a run's network, or one like it with fresh weights of a seed."""
    config, checkpoint = opened.config, opened.checkpoint
    if seed is not None:
        config, checkpoint = config.model_copy(update={"seed": seed}), None
    tokenizer = opened.objective.backbone.tokenizer_identity
    return identity_of_network(config, checkpoint, dtype=opened.dtype, tokenizer=tokenizer)


def open_shards(opened: Run, folder: str) -> ShardDataset:
    """Open images for evaluation in the form that the run reads, which they must fit."""
    data = opened.config.data
    # Use the run's own copy: the config's file may be gone.
    palette = opened.palette if data.palette else None
    dataset = ShardDataset(folder, evaluation_transform(data), cache=data.cache, palette=palette)
    for complaint in opened.objective.check_data(dataset.manifest):
        raise UserError(f"{folder} {complaint}")
    if dataset.manifest.kind == "palette" and dataset.manifest.identity != opened.palette.sha256:
        raise UserError(f"{folder} was made with another palette than the run")
    return dataset


def open_held_out(opened: Run, folder: str | None, *, option: str) -> ShardDataset:
    """Open the shards named by an option, or else the run's `data.validation`."""
    folder = folder or opened.config.data.validation
    if folder is None:
        raise UserError(f"the run has no data.validation; name a shard folder with {option}")
    return open_shards(opened, folder)
