"""Figure of the predicted standard deviation by token ("GIVT", figure 7, right).

The paper averages over generated tokens; here tokens are predicted from those of real images, as in
training.

Legend: b images, n tokens.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from megavis.composition.condition import Labels
from megavis.composition.model import Model
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset, Subset, representative
from megavis.data.loading.loader import read_batch
from megavis.densities.gaussians import GaussianMixture, parameters_of
from megavis.evaluation.figures import FigureInput, RenderedFigure
from megavis.model.inference import Inference

_CONDITIONAL, _UNCONDITIONAL = "#1f5fa8", "#c2571a"
_BATCH_SIZE = 32


def applies(objective: Trainable) -> bool:
    """Return whether mixtures of all tokens are predicted one at a time, also without a class."""
    match objective:
        case Model(schedule=schedule, density=GaussianMixture(), condition=Labels() as condition):
            predicts_all = schedule.is_sequential and not schedule.needs_given
            return predicts_all and condition.has_null_label
    return False


def predicted_deviations(
    inference: Inference, objective: Model, samples: Tensor, index: Tensor, labels: Tensor
) -> Tensor:
    """Return the mean standard deviation of each token.

    Args:
        objective: a model with a mixture density.
        samples: b samples in the form of the shards.
        index: int64 `[b]`, the samples, which determine the draws of the latents.
        labels: int64 `[b]`, -1 for no class.

    Returns:
        float32 `[b, n]`.
    """
    inputs = objective.inputs_from(samples, sample_index=index, labels=labels)
    density = objective.density
    assert isinstance(density, GaussianMixture)
    mixture = density.distribution(parameters_of(inference.predictions(inputs)))
    weights = mixture.logits.softmax(-1)[..., None]
    return (weights * mixture.log_scales.exp()).sum(-2).mean(-1)


def plot_deviations(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Predict with and without class, and plot both by token.

    Raises:
        UserError: no image has the class, or any.
    """
    objective, images, label = subject.objective, subject.images, options.label
    assert isinstance(objective, Model)
    samples: ShardDataset | Subset = images
    if label is None:
        samples = representative(images, options.num_images)
        wanted, text = samples.labels >= 0, "with a class"
    else:
        wanted, text = images.labels == label, f"of class {label}"
    chosen = np.flatnonzero(wanted)[: options.num_images]
    if not len(chosen):
        raise UserError(f"{images.directory} has no image {text}")
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(chosen), _BATCH_SIZE):
        places = chosen[start : start + _BATCH_SIZE]
        batch = read_batch(samples, places, places).to(subject.inference.context.device)
        named, none = (
            predicted_deviations(
                subject.inference, objective, batch.inputs, batch.sample_index, classes
            ).cpu()
            for classes in (batch.labels, torch.full_like(batch.labels, -1))
        )
        parts.append((named, none))
    means = [torch.cat(each).mean(0).tolist() for each in zip(*parts, strict=True)]
    rows = [
        {"token": token, "conditional": named, "unconditional": none}
        for token, (named, none) in enumerate(zip(*means, strict=True))
    ]
    words = ", ".join(
        f"{name} {sum(values) / len(values):.4f}"
        for name, values in zip(("conditional", "unconditional"), means, strict=True)
    )
    line = f"predicted standard deviation, mean over tokens of {len(chosen)} images: {words}"
    return RenderedFigure(_chart(means, name=subject.name), rows, [line])


def _chart(means: list[list[float]], *, name: str) -> Figure:
    figure = Figure(figsize=(6.0, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    curves = zip(
        means, ("conditional", "unconditional"), (_CONDITIONAL, _UNCONDITIONAL), strict=True
    )
    for values, label, color in curves:
        axes.plot(values, label=label, color=color, linewidth=1)
    axes.set_xlabel("token")
    axes.set_ylabel("predicted standard deviation")
    axes.set_title(name, fontsize="medium")
    axes.legend()
    return figure
