"""Figure of images decoded from samples of the posterior ("GIVT", figure 12).

Legend: b images, h and w height and width in pixels.
"""

from __future__ import annotations

import argparse
from statistics import fmean

from torch import Tensor

from megavis.composition.trainable import Trainable
from megavis.data.loading.loader import Batch, read_round_robin
from megavis.evaluation.figures import FigureInput, RenderedFigure
from megavis.evaluation.images.pair_metrics import signal_to_noise
from megavis.model.inference import Inference
from megavis.papers.vae.paper import VAEObjective
from megavis.sampling.pictures import image_grid


def applies(objective: Trainable) -> bool:
    """Return whether the objective is a VAE."""
    return isinstance(objective, VAEObjective)


def decoded(
    inference: Inference, objective: Trainable, batch: Batch, *, draws: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the decoded means of images, and images decoded from samples of the posterior.

    Args:
        batch: b images, whose sample indices determine the draws.
        draws: number of samples per image.

    Returns:
        uint8 `[b, h, w, 3]` each.
    """

    def decode(index: Tensor | None) -> Tensor:
        inputs = objective.inputs_from(batch.inputs, sample_index=index)
        return objective.reconstruction(inference.predictions(inputs))

    # Noise is a function of the index, so each draw uses different indices.
    first, count = batch.sample_index, int(batch.sample_index.max()) + 1
    return decode(None), [decode(first + draw * count) for draw in range(draws)]


def plot_posterior(subject: FigureInput, options: argparse.Namespace) -> RenderedFigure:
    """Decode means and samples, compute their PSNR, and draw the first eight images."""
    batch = read_round_robin(subject.images, options.num_images).to(
        subject.inference.context.device
    )
    mean, draws = decoded(subject.inference, subject.objective, batch, draws=options.draws)
    scores = {
        "mean": [signal_to_noise(mean, batch.inputs)],
        "draws": [signal_to_noise(each, batch.inputs) for each in draws],
    }
    rows = [
        {"decoded": name, "psnr": fmean(value for each in parts for value in each.tolist())}
        for name, parts in scores.items()
    ]
    columns = [each.cpu().numpy() for each in (batch.inputs, mean, *draws)]
    words = ", ".join(f"{row['decoded']} {row['psnr']:.2f} dB" for row in rows)
    return RenderedFigure(
        image_grid([*zip(*columns, strict=True)][:8]),
        rows,
        [f"PSNR of {len(batch)} images: {words}"],
    )
