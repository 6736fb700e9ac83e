"""Held-out likelihood and loss of a network."""

from __future__ import annotations

import math

import torch

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.results import LikelihoodResult
from megavis.model.inference import Inference


def measure_likelihood(
    name: str,
    step: int,
    inference: Inference,
    objective: Trainable,
    dataset: Samples,
    *,
    limit: int | None = None,
) -> LikelihoodResult:
    """Measure the likelihood of images that the network was not trained on.

    Args:
        limit: maximum number of images, from the first.

    Raises:
        UserError: the objective's loss is not a likelihood.
    """
    form = objective.likelihood
    if form is None:
        raise UserError(
            f"the loss of {objective.config.objective.name}, as configured in this run, is not a"
            " likelihood of images; megavis figure likelihood plots the validation losses of runs"
            " that megavis probe accepts"
        )
    loss = mean_loss(inference, objective, dataset, limit=limit)
    nats = loss / form.per_loss
    return LikelihoodResult(
        run=name,
        step=step,
        data=str(dataset.directory),
        num_images=len(dataset) if limit is None else min(limit, len(dataset)),
        dimension=form.dimension,
        dimensions_per_image=form.per_image,
        given=form.given,
        nats_per_dimension=nats,
        bits_per_dimension=nats / math.log(2),
        nats_per_image=nats * form.per_image,
        loss=loss,
        precision=str(next(iter(inference.layers.named_parameters()))[1].dtype).removeprefix(
            "torch."
        ),
    )


@torch.no_grad()
def mean_loss(
    inference: Inference,
    objective: Trainable,
    dataset: Samples,
    *,
    limit: int | None = None,
    batch_size: int = 64,
) -> float:
    """Return the objective's mean loss over images; labels are not needed.

    It is the `validation_loss` of training, with the same random draws.
    """
    total = count = 0.0
    for batch in evaluation_batches(dataset, batch_size=batch_size, limit=limit):
        sequence = objective.sequence(batch.to(inference.context.device))
        predictions = inference.predictions(sequence.inputs)
        loss, number = objective.held_out_loss(predictions, sequence.targets, len(batch))
        total, count = total + float(loss), count + float(number)
    return total / count
