"""`megavis sample`: draw images from a run, or complete photographs, into a PNG."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands import sample_latents
from megavis.commands.probing import add_layout_argument
from megavis.commands.sample_npz import choice_of_ids, write_samples
from megavis.commands.sample_options import check_options
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.data.batch import Batch
    from megavis.notebook import Run
    from megavis.objectives.base import PatchByPatch


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "sample",
        help="draw images, or complete photographs",
        description="Draw images from a run, or with --prefix complete held-out photographs: a row"
        " each, original | what was given | completions. A run that predicts from images draws what"
        " belongs to held-out ones: image | target | drawn targets. Runs alone, or under torchrun,"
        " where the processes share the images.",
        epilog="example: megavis sample runs/igpt-demo --prefix half --top-p 0.95\n"
        "         megavis sample runs/givt --classes 207,360 --scale 0.95 --guidance 0.4",
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--num-images", type=int, default=16, help="default: 16")
    parser.add_argument(
        "--prefix",
        type=prefix_share,
        default=0.0,
        metavar="none|half|SHARE",
        help="share of the image, first in the run's order, that is given; default: none",
    )
    parser.add_argument(
        "--completions", type=int, default=3, help="or targets of each photograph; default: 3"
    )
    parser.add_argument("--images", help="shard folder of the photographs; default: the run's own")
    parser.add_argument(
        "--temperature",
        type=float,
        help="0: the likeliest id, or no noise (darl); default: 1, or the config's",
    )
    parser.add_argument("--top-k", type=int, help="choose among so many ids")
    parser.add_argument("--top-p", type=float, help="choose among ids of so much probability")
    parser.add_argument(
        "--sampling-steps", type=int, help="from noise to a patch (darl); default: the config's"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides every draw; default: 0")
    parser.add_argument("--batch-size", type=int, default=64, help="images at once; default: 64")
    parser.add_argument("--step", type=int, help="checkpoint; default: the newest")
    parser.add_argument("--out", type=Path, help="PNG file; default: in RUN/samples")
    parser.add_argument(
        "--npz",
        type=Path,
        metavar="FILE",
        help="write --num-images images, classes in turns, as evaluation takes them; a command that"
        " was cut off goes on",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: CUDA where there is")
    add_layout_argument(parser)
    sample_latents.add_arguments(parser)
    parser.set_defaults(run=run)


def prefix_share(text: str) -> float:
    """Read `none`, `half` or a share in [0, 1)."""
    named = {"none": 0.0, "half": 0.5}
    try:
        share = named[text] if text in named else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not none, half or a share in [0, 1)")
    return share


def run(args: argparse.Namespace) -> int:
    """Draw and write the picture.

    Raises:
        UserError: the run cannot be opened or sampled.
    """
    from megavis.commands.quiet import quietly

    if min(args.num_images, args.completions, args.batch_size) < 1:
        raise UserError("--num-images, --completions and --batch-size must be at least 1")
    with quietly():
        from megavis.notebook import Run
        from megavis.parallel.context import close_context, open_context
        from megavis.parallel.launch import read_launch
        from megavis.sampling.grids import save_png

        context = open_context(
            read_launch(os.environ),
            tensor_model_parallel_size=args.tensor_parallel,
            device=args.device,
        )
    try:
        with quietly():
            opened = Run.open(args.run_folder, step=args.step)
        check_options(opened.objective, args)
        pixels = _picture(opened, args)
        kind = "completions" if args.prefix else "samples"
        out = args.out or opened.folder / "samples" / f"{kind}-{opened.step:08d}.png"
        if context.is_main and pixels is not None:
            save_png(out, pixels)
            sys.stdout.write(f"{out}\n")
    finally:
        close_context()
    return 0


def _picture(opened: Run, args: argparse.Namespace) -> Any:
    from megavis.objectives.base import PatchByPatch, TokenByToken
    from megavis.objectives.real_tokens import OneByOne, ReadsImages, Uncovers
    from megavis.sampling.gallery import gallery_of

    if args.npz is not None:
        write_samples(opened, args)
        return None
    if isinstance(opened.objective, ReadsImages):
        return sample_latents.predictions(opened, args, _held_out(opened, args))
    if isinstance(opened.objective, OneByOne | Uncovers):
        return sample_latents.picture(opened, args)
    if isinstance(opened.objective, PatchByPatch):
        return _picture_of_patches(opened, opened.objective, args)
    if not isinstance(opened.objective, TokenByToken):
        gallery = gallery_of(opened.objective, opened.folder)
        examples = _examples(opened, args)
        return gallery.draw(opened.runner, examples, num_images=args.num_images)
    from megavis.sampling.pictures import picture_of_completions, picture_of_samples

    model = (opened.runner, opened.objective, opened.palette)
    options = {
        **choice_of_ids(args),
        "seed": args.seed,
        "batch_size": args.batch_size,
    }
    if not args.prefix:
        return picture_of_samples(*model, num_images=args.num_images, **options)
    return picture_of_completions(
        *model,
        originals=_photographs(opened, args),
        num_given=round(args.prefix * opened.objective.num_tokens),
        num_completions=args.completions,
        **options,
    )


def _picture_of_patches(opened: Run, objective: PatchByPatch, args: argparse.Namespace) -> Any:
    from megavis.sampling.pictures import picture_of_patches

    originals = None
    if args.prefix:
        originals = _held_out(opened, args).inputs
    return picture_of_patches(
        opened.runner,
        objective,
        originals=originals,
        num_images=args.num_images,
        num_given=round(args.prefix * objective.num_tokens),
        num_completions=args.completions,
        num_steps=args.sampling_steps,
        temperature=args.temperature,
        seed=args.seed,
        batch_size=args.batch_size,
    )


def _photographs(opened: Run, args: argparse.Namespace) -> Tensor:
    """Return ids `[b, n]` of held-out photographs, classes taking turns."""
    return opened.to_ids(_held_out(opened, args).inputs)


def _held_out(opened: Run, args: argparse.Namespace) -> Batch:
    """Return held-out images, classes taking turns; raises UserError where there are none."""
    from megavis.commands.opening import open_held_out, read_in_turn

    dataset = open_held_out(opened, args.images, option="--images")
    return read_in_turn(dataset, args.num_images).to(opened.context.device)


def _examples(opened: Run, args: argparse.Namespace) -> Batch | None:
    """Return held-out images, classes taking turns; None where no folder is named."""
    if args.images is None and opened.config.data.validation is None:
        return None
    return _held_out(opened, args)
