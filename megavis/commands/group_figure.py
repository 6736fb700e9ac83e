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

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.model.perceptual import PerceptualDistance
    from megavis.notebook import Run

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
    from megavis.sampling.grids import completion_grid, save_png
    from megavis.sampling.pictures import pixels_of

    perceptual = open_perceptual(args)
    opened.sampler(groups=args.groups[0])
    dataset = held_out_images(opened, args)
    inputs = read_in_turn(dataset, args.num_images).inputs.to(opened.context.device)
    paper = opened.objective.generation()
    originals = paper.to_images(paper.tokens_of(inputs), opened.folder)
    rows, columns, given = [], [], None
    for count in args.groups:
        images, shown = _fill_all(opened, args, inputs, num_groups=count)
        given = pixels_of(shown, originals.cpu().numpy())
        scores = _score(originals, images, given, perceptual)
        rows.append({"groups": count, **scores})
        columns.append(images[:8].cpu().numpy())
    folder: Path = args.run_folder / "evaluation"
    assert given is not None
    grid = completion_grid(originals[:8].cpu().numpy(), given[:8], columns)
    save_png(folder / "groups.png", grid)
    table = write_table(folder / "groups.csv", rows)
    for row in rows:
        sys.stdout.write(", ".join(f"{name} {value:.4g}" for name, value in row.items()) + "\n")
    sys.stdout.write(f"{folder / 'groups.png'}\n{table}\n")
    return 0


def _fill_all(
    opened: Run, args: argparse.Namespace, inputs: Tensor, *, num_groups: int
) -> tuple[Tensor, Tensor]:
    """Fill in all images, uint8 `[b, h, w, 3]`; returns also which tokens were given."""
    import torch

    from megavis.sampling.groupwise import fill

    sampler = opened.sampler(seed=args.seed, groups=num_groups)
    num_given = round(args.share * sampler.paper.num_tokens)
    numbers = torch.arange(len(inputs), device=inputs.device)
    # All at once no order is left to average over.
    num_orders = args.orders if num_groups > 1 else 1
    parts = [
        fill(sampler, inputs[each], each, num_given=num_given, num_orders=num_orders)
        for each in numbers.split(_BATCH_SIZE)
    ]
    return torch.cat([part.images for part in parts]), torch.cat([part.given for part in parts])


def _score(
    originals: Tensor, images: Tensor, given: Any, perceptual: PerceptualDistance | None
) -> dict[str, float]:
    import torch

    from megavis.evaluation.images.filling import score_filling

    hidden = ~torch.from_numpy(given).to(originals.device)
    return score_filling(originals, images, hidden, perceptual=perceptual)
