"""`megavis sample`: draw images from a run, or complete photographs, into a PNG."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.options import refuse_options
from megavis.commands.probing import add_layout_argument
from megavis.commands.sampling_options import add_options, chosen_options, spelled
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megavis.data.loading.batch import Batch
    from megavis.notebook import Run


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
        "         megavis sample runs/givt --classes 207,360 --temperature 0.95 --guidance 0.4",
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
        "--completions",
        type=int,
        help="of each photograph, or targets drawn from it; default: 3, or 1 where groups differ",
    )
    parser.add_argument("--images", help="shard folder of the photographs; default: the run's own")
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
    _add_classes(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def _add_classes(parser: argparse.ArgumentParser) -> None:
    """Add which classes are drawn, and what else is shown of them."""
    classes = parser.add_argument_group("runs with classes")
    classes.add_argument("--classes", type=_numbers, metavar="C,C,...", help="a row of each")
    classes.add_argument("--per-class", type=int, default=8, help="images of each; default: 8")
    classes.add_argument(
        "--then-classes", type=_numbers, metavar="C,C,...", help="other classes of the lower halves"
    )
    parser.add_argument(
        "--show-rounds", action="store_true", help="a draw from the prior and every round, a row"
    )
    parser.add_argument(
        "--moments",
        action="store_true",
        help="compare the moments of --num-images latents with held-out ones, in RUN/evaluation",
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of classes such as 0,3,7") from None


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

    if min(args.num_images, args.completions or 1, args.batch_size, args.per_class) < 1:
        raise UserError(
            "--num-images, --completions, --batch-size and --per-class must be at least 1"
        )
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
        pixels = _draw(opened, args)
        kind = "completions" if args.prefix else "samples"
        out = args.out or opened.folder / "samples" / f"{kind}-{opened.step:08d}.png"
        if context.is_main and pixels is not None:
            save_png(out, pixels)
            sys.stdout.write(f"{out}\n")
    finally:
        close_context()
    return 0


def _check_together(args: argparse.Namespace, *, reads_images: bool) -> None:
    """Refuse options that do not apply together; raises UserError.

    Args:
        args: as read.
        reads_images: every image is drawn from another.
    """
    classes, shown = ("--classes", "--per-class", "--then-classes"), ("--moments", "--show-rounds")
    if args.npz is not None:
        to = "to --npz, which holds --num-images images, classes in turns"
        refuse_options(args, ("--out", "--completions", "--images", *classes, *shown), to)
    if args.moments:
        drawn = ("--out", "--completions", "--prefix", *classes, "--show-rounds")
        refuse_options(args, drawn, "to --moments, which draws no picture")
    elif not args.prefix and not reads_images:
        refuse_options(args, ("--completions", "--images"), "without --prefix")
    if args.show_rounds:
        refuse_options(args, ("--then-classes", "--prefix"), "to --show-rounds")
    if args.classes is None:
        refuse_options(args, ("--per-class", "--then-classes"), "without --classes")
    else:
        to = "to --classes; --per-class says how many of each"
        refuse_options(args, ("--num-images", "--prefix"), to)


def _draw(opened: Run, args: argparse.Namespace) -> Any:
    """Draw what the options ask for: a grid uint8 `[H, W, 3]`, or None where it is a file."""
    from megavis.commands.sample_moments import compare_moments
    from megavis.commands.sample_npz import write_samples

    if opened.objective.reconstructs:
        return _reconstructions(opened, args)
    paper = opened.objective.generation()
    names = paper.condition.names
    if paper.schedule.needs_given and args.npz is None and not args.moments:
        args.prefix = args.prefix or paper.usual_share
    _check_together(args, reads_images="image" in names)
    if args.npz is not None:
        return write_samples(opened, args)
    options = chosen_options(args)
    sampler = opened.sampler(seed=args.seed, spell=spelled, **options)
    if args.moments:
        return compare_moments(opened, args, sampler)
    # Refused before any work is done.
    sampler.paper.check_images(opened.folder)
    conditions, later, columns = _conditions(args, sampler.paper.condition.names)
    if args.show_rounds:
        from megavis.sampling.pictures import picture_of_rounds

        count = args.num_images if conditions is None else len(conditions["labels"])
        usual = sampler.paper.condition.usual(count, None)
        return picture_of_rounds(sampler, usual if conditions is None else conditions, count)
    return _picture(opened, args, options, conditions=conditions, later=later, num_columns=columns)


def _picture(
    opened: Run, args: argparse.Namespace, options: Mapping[str, Any], **layout: Any
) -> Any:
    from megavis.sampling.pictures import picture

    paper = opened.objective.generation()
    own = paper.schedule.columns if args.prefix else ({},)
    columns = [{**column, **options} for column in own]
    # An option that was chosen may leave no difference between the columns.
    different = [column for i, column in enumerate(columns) if column not in columns[:i]]
    samplers = [opened.sampler(seed=args.seed, spell=spelled, **each) for each in different]
    reads_images = "image" in paper.condition.names
    count = layout["conditions"] and len(layout["conditions"]["labels"])
    drawn = picture(
        samplers,
        _held_out(opened, args) if args.prefix or reads_images else None,
        num_images=count or args.num_images,
        share=args.prefix,
        num_copies=args.completions or (3 if len(samplers) == 1 else 1),
        batch_size=args.batch_size,
        **layout,
    )
    acceptance = samplers[0].acceptance
    if acceptance.counts is not None and opened.context.is_main:
        sys.stdout.write(
            f"guidance: {acceptance.rate:.3f} of the proposals accepted, for"
            f" {acceptance.share_found:.2%} of the numbers\n"
        )
    return drawn


def _conditions(
    args: argparse.Namespace, names: tuple[str, ...]
) -> tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None, int]:
    """Return conditions of each image and of its second half, and the columns of the grid.

    Raises:
        UserError: the run has no classes, or the lists do not match.
    """
    import torch

    if args.classes is None:
        return None, None, 8
    if "labels" not in names or "image" in names:
        raise UserError("--classes does not apply to this run: it draws no images of classes")

    def labels(classes: list[int]) -> Mapping[str, Tensor]:
        return {"labels": torch.tensor(classes).repeat_interleave(args.per_class)}

    if args.then_classes is None:
        return labels(args.classes), None, args.per_class
    if len(args.then_classes) != len(args.classes):
        raise UserError("--then-classes wants as many classes as --classes")
    return labels(args.classes), labels(args.then_classes), args.per_class


def _reconstructions(opened: Run, args: argparse.Namespace) -> Any:
    name = opened.config.objective.name
    others = ["--prefix", "--completions", "--npz", "--classes", "--moments", "--show-rounds"]
    others += [spelled(option) for option in chosen_options(args)]
    refuse_options(args, others, f"to this run of {name}, which reconstructs --images")
    from megavis.sampling.pictures import Gallery

    gallery = Gallery(opened.objective, opened.folder)
    examples = None
    if args.images is not None or opened.config.data.validation is not None:
        examples = _held_out(opened, args)
    return gallery.draw(opened.runner, examples, num_images=args.num_images)


def _held_out(opened: Run, args: argparse.Namespace) -> Batch:
    """Return held-out images, classes taking turns; raises UserError where there are none."""
    from megavis.commands.opening import open_held_out, read_in_turn

    dataset = open_held_out(opened, args.images, option="--images")
    return read_in_turn(dataset, args.num_images).to(opened.context.device)
