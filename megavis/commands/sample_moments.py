"""`megavis sample --moments`: drawn latents against held-out ones, moment by moment."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megavis.commands.sampling_options import chosen_options
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.notebook import Run
    from megavis.sampling.sampler import Sampler


def compare_moments(opened: Run, args: argparse.Namespace, sampler: Sampler) -> None:
    """Compare drawn with held-out latents, and as a yardstick those of training with them.

    Raises:
        UserError: there are no held-out latents, or the run draws none.
    """
    from megavis.data.format.files import write_atomically
    from megavis.data.format.manifest import MANIFEST_NAME
    from megavis.evaluation.moments import compare, largest_differences

    folder = args.images or opened.config.data.validation
    if folder is None:
        raise UserError("the run has no data.validation; name latents shards with --images")
    held_out, labels = _stored_latents(opened, folder, args.num_images)
    drawn = sampler.draw(len(labels), conditions={"labels": labels}, batch_size=args.batch_size)
    result = {**chosen_options(args), **compare(drawn.cpu(), held_out)}
    differences = {"drawn": result["largest_difference"]}
    trained_on = opened.config.data.train
    if isinstance(trained_on, str) and Path(trained_on, MANIFEST_NAME).exists():
        seen, _ = _stored_latents(opened, trained_on, args.num_images)
        result["training_difference"] = largest_differences(seen, held_out)
        differences["of training"] = result["training_difference"]
    if opened.context.is_main:
        path = opened.folder / "evaluation" / f"moments-{opened.step:08d}.json"
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, (json.dumps(result, indent=2) + "\n").encode())
        sys.stdout.write(f"{path}\nlargest difference to held-out latents over the channels\n")
        for name, moments in differences.items():
            words = ", ".join(f"{moment} {value:.3f}" for moment, value in moments.items())
            sys.stdout.write(f"  {name}: {words}\n")


def _stored_latents(opened: Run, folder: str, count: int) -> tuple[Tensor, Tensor]:
    """Return latents `[b, c, h, w]`, evenly spaced over a shard folder, and their labels."""
    import numpy as np

    from megavis.commands.opening import open_shards
    from megavis.data.loading.loader import read_batch

    dataset = open_shards(opened, folder)
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), count)).astype(np.int64)
    batch = read_batch(dataset, places, places)
    latents = opened.objective.generation().tokens_of(batch.inputs, batch.sample_index)
    if latents.ndim != 4 or not latents.is_floating_point():
        raise UserError(
            f"--moments is for latents; runs of {opened.config.objective.name} draw none"
        )
    return latents, batch.labels
