"""Images id by id, with the keys and values of earlier places kept.

"Generative Pretraining from Pixels", section 2.1: each pixel is drawn from p(x_i | x_<i). What is
drawn is a function of seed, image and place alone, so every process of every layout draws the same
and none has to tell the others.

Legend: b images, n places of the sequence, p places given, v ids of the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.model.runner import Runner
from megavis.model.stack import LocalLayers
from megavis.objectives.base import TokenByToken
from megavis.objectives.trainable import Trainable
from megavis.parallel.random import uniform
from megavis.sampling.choice import Choice


def generate(
    runner: Runner,
    objective: Trainable,
    *,
    batch_size: int,
    prefix: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    first_image: int = 0,
) -> Tensor:
    """Draw images, or complete them; every process of the job calls this together.

    Args:
        runner: the model, in any layout.
        objective: the paper; it must be one whose sequences are generated id by id.
        batch_size: images b.
        prefix: int64 `[b, p]`, the ids that are given, in the run's order; none when absent.
        temperature: see `Choice`, as `top_k` and `top_p`.
        top_k: see `Choice`.
        top_p: see `Choice`.
        seed: decides every draw, together with the number of the image.
        first_image: number of the first image. Images 0 to 63 drawn as one batch, or as two
            batches of 32 with `first_image` 0 and 32, are the same.

    Returns:
        int64 `[b, n]`, on the runner's device, in the run's order, beginning with the prefix.

    Raises:
        UserError: when the paper cannot be sampled so, or a filter is out of range.
        ValueError: when the prefix has another shape.
    """
    choice = Choice(temperature=temperature, top_k=top_k, top_p=top_p)
    if not isinstance(objective, TokenByToken):
        raise UserError(f"{objective.config.objective.name} is not generated id by id")
    device, num_places = runner.context.device, objective.num_tokens
    ids = torch.zeros(batch_size, num_places, dtype=torch.int64, device=device)
    num_given = _copy_prefix(prefix, ids)
    numbers = torch.arange(first_image, first_image + batch_size, device=device)
    draws = uniform(numbers, num_places, seed=seed, purpose="sample")
    cache = runner.cache(num_places, num_sequences=batch_size)
    with runner.evaluating(), without_sequence_parallelism(runner.layers):
        for place in range(num_given, num_places):
            # The first pass takes all that is given at once, every later one a single place.
            inputs = objective.inputs_at(ids, cache.length, place + 1)
            logits = objective.outputs(runner.predictions(inputs, cache=cache))[:, -1]
            ids[:, place] = choice.draw(logits, draws[:, place])
    return ids


def _copy_prefix(prefix: Tensor | None, ids: Tensor) -> int:
    """Write the given ids to the front of `ids` `[b, n]`; return how many there are."""
    if prefix is None:
        return 0
    if prefix.ndim != 2 or len(prefix) != len(ids) or prefix.shape[1] > ids.shape[1]:
        raise ValueError(
            f"the prefix has shape {list(prefix.shape)}, not [{len(ids)}, at most {ids.shape[1]}]"
        )
    ids[:, : prefix.shape[1]] = prefix
    return prefix.shape[1]


@contextlib.contextmanager
def without_sequence_parallelism(layers: LocalLayers) -> Iterator[None]:
    """Let each process of the tensor group see all tokens: a single one cannot be divided.

    The layers ask their own flag or their config in every forward pass, and both are put back.
    """
    flagged: dict[int, Any] = {}
    for root in layers.modules:
        for module in root.modules():
            for holder in (module, getattr(module, "config", None)):
                if getattr(holder, "sequence_parallel", False):
                    flagged[id(holder)] = holder
    for holder in flagged.values():
        holder.sequence_parallel = False
    try:
        yield
    finally:
        for holder in flagged.values():
            holder.sequence_parallel = True
