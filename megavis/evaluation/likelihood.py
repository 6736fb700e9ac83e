"""How well a network predicts held-out images, and what its features are worth at that point."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megavis.data.dataset import ShardDataset
from megavis.data.loader import evaluation_batches
from megavis.evaluation.networks import Network
from megavis.evaluation.probe import ProbeData, ProbeSettings, score_best_layer
from megavis.model.runner import Runner
from megavis.objectives.trainable import Trainable


@dataclass(frozen=True)
class CheckpointScore:
    """One checkpoint: a point of iGPT's Figure 3.

    Attributes:
        run: name of the run.
        step: optimizer steps.
        validation_loss: the objective's mean loss over the validation images.
        layer: best layer on held-out training images.
        accuracy: of its linear probe on the validation images, in [0, 1].
    """

    run: str
    step: int
    validation_loss: float
    layer: int
    accuracy: float


@torch.no_grad()
def mean_loss(
    runner: Runner,
    objective: Trainable,
    dataset: ShardDataset,
    *,
    limit: int | None = None,
    batch_size: int = 64,
) -> float:
    """Return the objective's mean loss over images, each weighing the same.

    Args:
        runner: the model.
        objective: the paper; its random draws are those of training's validation.
        dataset: images; labels are not needed.
        limit: only the first so many.
        batch_size: images of one forward pass.
    """
    batches = evaluation_batches(
        dataset, batch_size=batch_size, data_parallel_rank=0, data_parallel_size=1, limit=limit
    )
    total, count = 0.0, 0
    for batch in batches:
        sequence = objective.sequence(batch.to(runner.context.device))
        loss = objective.loss(runner.predictions(sequence.inputs), sequence.targets)
        total, count = total + float(loss) * len(batch), count + len(batch)
    return total / count


def score_checkpoint(
    name: str,
    step: int,
    network: Network,
    data: ProbeData,
    settings: ProbeSettings,
) -> CheckpointScore:
    """Return loss and best layer's accuracy of one checkpoint, on the same validation images.

    Raises:
        UserError: when the images have no labels, or are too few.
    """
    best = score_best_layer(network, data, settings)
    limit = data.num_validation
    loss = mean_loss(network.runner, network.objective, data.validation, limit=limit)
    return CheckpointScore(name, step, loss, best.layer, best.accuracy)
