"""The run of an ImageGPT folder.

Legend: b images, n pixels.
"""

from __future__ import annotations

import argparse
import math

import torch

from megavis.composition.released_run import Compared, OpenedRun, ReleasedRun
from megavis.config.errors import UserError
from megavis.config.schema import ModelConfig
from megavis.papers.igpt.config import IGPTConfig
from megavis.papers.igpt.imagegpt import from_imagegpt, has_biases, model_section
from megavis.papers.igpt.imagegpt_folder import folder_logits, read_clusters, read_folder
from megavis.tokenizers.palette import Palette


def read_imagegpt(args: argparse.Namespace) -> ReleasedRun:
    """Convert a folder; logits of random ids `[b, n]` are compared.

    Raises:
        UserError: it is not such a folder, or its palette does not fit.
    """
    settings, tensors = read_folder(args.source)
    side = math.isqrt(settings["n_positions"])
    if side * side != settings["n_positions"]:
        raise UserError(f"config.json: n_positions {settings['n_positions']} is not a square image")
    num_colors = settings["vocab_size"] - 1

    def compare(run: OpenedRun) -> Compared:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(num_colors, (2, settings["n_positions"]), generator=generator)
        yield run.outputs(ids), folder_logits(tensors, settings, ids)

    return ReleasedRun(
        IGPTConfig(vocabulary_size=num_colors),
        from_imagegpt(tensors, num_heads=settings["n_head"]),
        image_size=side,
        sections={"model": ModelConfig(**model_section(settings, add_bias=has_biases(tensors)))},
        palette=_palette(args, num_colors),
        compare=compare,
        compared="logits",
    )


def _palette(args: argparse.Namespace, num_colors: int) -> Palette | None:
    """Return the named palette, or the folder's own; None if it has none."""
    given = args.palette is not None
    palette = Palette.load(args.palette) if given else read_clusters(args.source)
    if palette is not None and palette.num_tokens > num_colors:
        raise UserError(
            f"{args.palette if given else args.source}: {palette.num_tokens} colours, more than the"
            f" {num_colors} of the model"
        )
    return palette
