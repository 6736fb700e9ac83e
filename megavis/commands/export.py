"""`megavis export`: a run's weights in a form that others read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_run, add_step
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.notebook import Run


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "export",
        help="write a run's weights in a form that others read",
        description="Write whole named tensors, from a checkpoint of any layout: as one safetensors"
        " file, or as an ImageGPT folder that transformers opens, after comparing the logits of"
        " both on random input.",
        epilog="example: megavis export runs/igpt_demo --to imagegpt exported/igpt_demo",
    )
    add_run(parser)
    parser.add_argument("--to", choices=("imagegpt", "safetensors"), required=True, help="form")
    parser.add_argument("out", type=Path, metavar="DIR", help="new folder, or .safetensors file")
    add_step(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write; nothing is kept that does not agree.

    Raises:
        UserError: the run cannot be opened, or has no such form.
    """
    from megavis.commands.quiet import quietly

    if args.out.exists():
        raise UserError(f"{args.out} exists; choose another name")
    with quietly():
        from safetensors.torch import save_file

        from megavis.checkpoint.format.folder import step_folder
        from megavis.checkpoint.format.reader import read_weights
        from megavis.notebook import Run

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
    import torch

    from megavis.data.format.manifest import PALETTE_NAME
    from megavis.papers.igpt.imagegpt import fits_imagegpt, to_imagegpt
    from megavis.papers.igpt.imagegpt_folder import (
        check_agreement,
        folder_logits,
        folder_settings,
        write_folder,
    )

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
