"""`megavis figure groups`: hidden patches predicted group by group, and all at once."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.opening import job_closed, open_run, read_in_turn
from megavis.commands.patch_figures import add_image_arguments, held_out_images
from megavis.commands.perceptual import add_perceptual_arguments, open_perceptual
from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.model.perceptual import PerceptualDistance
    from megavis.model.runner import Runner
    from megavis.notebook import Run
    from megavis.sampling.groupwise import GroupByGroup

_BATCH_SIZE = 64


def add_group_figure(figures: Any) -> None:
    """Add it to the figures of `megavis figure`."""
    parser = figures.add_parser(
        "groups",
        help="hidden patches predicted group by group, and all at once",
        description="Give a share of each held-out image's patches at random and predict the others"
        " in groups, each seeing those before it; one group is masked modelling's way. Prints the"
        " PSNR of what was hidden for each number of groups. The picture shows the first eight"
        " images: original, what was given, one column a number of groups.",
        epilog="example: megavis figure groups runs/patches --groups 1,4,12",
    )
    add_image_arguments(parser, num_images=256)
    parser.add_argument("--share", type=float, default=0.25, help="of the patches is given")
    parser.add_argument(
        "--groups", type=group_counts, default=(1, 4, 12), metavar="N,N", help="numbers of groups"
    )
    parser.add_argument(
        "--orders", type=positive, default=1, help="of the hidden patches, averaged over"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides what is hidden")
    add_perceptual_arguments(parser)
    parser.set_defaults(run=draw_groups)


def group_counts(text: str) -> tuple[int, ...]:
    """Read numbers of groups, as `1,4,12`."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' does not list numbers of groups, as 1,4,12")
    return counts


def draw_groups(args: argparse.Namespace) -> int:
    """Predict, compare and draw.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        return _draw(opened, args)


def _draw(opened: Run, args: argparse.Namespace) -> int:
    from megavis.evaluation.figures import write_table
    from megavis.sampling.grids import save_png
    from megavis.sampling.groupwise import GroupByGroup
    from megavis.sampling.pictures import picture_of_fillings

    objective = opened.objective
    if not isinstance(objective, GroupByGroup):
        name = opened.config.objective.name
        raise UserError(f"{name} does not predict several patches from any others")
    perceptual = open_perceptual(args)
    dataset = held_out_images(opened, args)
    originals = read_in_turn(dataset, args.num_images).inputs.to(opened.context.device)
    options = {"share_given": args.share, "num_orders": args.orders, "seed": args.seed}
    rows = [
        {
            "groups": count,
            **_score(opened.runner, objective, originals, perceptual, num_groups=count, **options),
        }
        for count in args.groups
    ]
    shown = picture_of_fillings(
        opened.runner, objective, originals=originals[:8], counts=args.groups, **options
    )
    folder: Path = args.run_folder / "evaluation"
    save_png(folder / "groups.png", shown)
    table = write_table(folder / "groups.csv", rows)
    for row in rows:
        sys.stdout.write(", ".join(f"{name} {value:.4g}" for name, value in row.items()) + "\n")
    sys.stdout.write(f"{folder / 'groups.png'}\n{table}\n")
    return 0


def _score(
    runner: Runner,
    objective: GroupByGroup,
    originals: Tensor,
    perceptual: PerceptualDistance | None,
    **options: Any,
) -> dict[str, float]:
    """Fill in all images and score them."""
    import torch

    from megavis.evaluation.images.filling import score_filling
    from megavis.sampling.groupwise import fill, patches_to_pixels

    seed = options.pop("seed")
    # What is hidden depends on seed and place in the batch; each batch has a seed of its own.
    parts = [
        fill(runner, objective, batch, seed=seed + number, **options)
        for number, batch in enumerate(originals.split(_BATCH_SIZE))
    ]
    given = torch.cat([part.given for part in parts])
    return score_filling(
        originals,
        torch.cat([part.images for part in parts]),
        ~patches_to_pixels(given, originals.shape[1], originals.shape[2]),
        perceptual=perceptual,
    )
