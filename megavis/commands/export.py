"""`megavis export` and `megavis checkpoint convert`: a run's weights in other forms."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megavis.checkpoint.format.folder import step_folder
from megavis.checkpoint.format.reader import read_weights
from megavis.checkpoint.state import convert as conversion
from megavis.commands.checkpoint import chosen_step
from megavis.commands.quiet import quietly
from megavis.config.errors import UserError
from megavis.data.format.manifest import PALETTE_NAME
from megavis.notebook import Run
from megavis.papers.igpt.imagegpt import fits_imagegpt, to_imagegpt
from megavis.papers.igpt.imagegpt_folder import (
    check_agreement,
    folder_logits,
    folder_settings,
    write_folder,
)


def run(args: argparse.Namespace) -> int:
    """Write; nothing is kept that does not agree.

    Raises:
        UserError: the run cannot be opened, or has no such form.
    """
    with quietly():
        opened = Run.open(args.run_folder, step=args.step, device="cpu")
    weights = read_weights(step_folder(opened.folder, opened.step))
    if args.to == "safetensors":
        args.out.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, args.out)
        sys.stdout.write(f"{args.out}: {len(weights)} tensors\n")
        return 0
    difference = _export_imagegpt(opened, weights, args.out)
    sys.stdout.write(f"{args.out}: logits agree to {difference:.1e} on random input\n")
    return 0


def _export_imagegpt(opened: Run, weights: dict[str, Any], out: Path) -> float:
    objective, model = opened.objective, opened.config.model
    try:
        colors = fits_imagegpt(opened.config)
    except UserError as error:
        raise UserError(f"--to imagegpt: {error}") from None
    settings = folder_settings(model, num_colors=colors, num_pixels=objective.backbone.num_tokens)
    tensors = to_imagegpt(weights, num_heads=model.num_attention_heads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(colors, (2, objective.backbone.num_tokens), generator=generator)
    difference = check_agreement(opened.outputs(ids), folder_logits(tensors, settings, ids))
    has_palette = (opened.folder / PALETTE_NAME).exists()
    write_folder(out, settings, tensors, palette=opened.palette if has_palette else None)
    return difference


def convert(args: argparse.Namespace) -> int:
    """Write the checkpoint into another run folder, with the run's config."""
    source = step_folder(args.run_folder, chosen_step(args.run_folder, args.step))
    written = conversion.convert(source, args.target, tensor_size=args.tensor, data_size=args.data)
    for file in args.run_folder.iterdir():
        if file.name in ("config.yaml", "palette.npy") and not (args.target / file.name).exists():
            shutil.copyfile(file, args.target / file.name)
    sys.stdout.write(f"{written}\n")
    return 0
