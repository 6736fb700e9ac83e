"""`megavis figure positions`, `jigsaw` and `mixture`: where a model puts patches."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavis.commands.opening import job_closed, open_run, read_in_turn
from megavis.commands.patch_figures import add_image_arguments, held_out_images
from megavis.commands.save_figure import save_figure

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.composition.places import Places
    from megavis.notebook import Run

_RATIOS = (0.0, 0.25, 0.5, 0.75)


def add_position_figures(figures: Any) -> None:
    """Add them to the figures of `megavis figure`."""
    positions = figures.add_parser(
        "positions",
        help="patches put in their place, by mask ratio",
        description="Let the model name the place of every patch of held-out images at several mask"
        " ratios, and draw how often it is the true one.",
        epilog="example: megavis figure positions runs/demo",
    )
    add_image_arguments(positions, num_images=1000)
    positions.set_defaults(run=draw_positions)
    for name, text, run in (
        ("jigsaw", "images put together from predicted places", jigsaw),
        ("mixture", "patches of two images, mixed and put together", mixture),
    ):
        parser = figures.add_parser(
            name,
            help=text,
            description=f"Draw {text} at mask ratios 0, 0.25, 0.5 and 0.75. Context patches are"
            " outlined in green; patches that fall on the same place are averaged.",
            epilog=f"example: megavis figure {name} runs/demo --num-images 4",
        )
        add_image_arguments(parser, num_images=4)
        parser.add_argument("--seed", type=int, default=0, help="decides context and shuffling")
        parser.set_defaults(run=run)


def draw_positions(args: argparse.Namespace) -> int:
    """Measure at mask ratios from 0 to 0.9 and draw.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    from dataclasses import asdict

    with job_closed():
        opened, objective = _open(args)
        from megavis.evaluation import positions as measured

        dataset = held_out_images(opened, args)
        scores = [
            measured.position_accuracy(
                opened.runner,
                objective,
                dataset,
                mask_ratio=number / 10,
                num_images=args.num_images,
            )
            for number in range(10)
        ]
    picture = measured.draw_accuracy(
        scores, name=args.run_folder.name, trained_at=objective.mask_ratio
    )
    words = ", ".join(f"{score.mask_ratio:.1f}: {score.accuracy:.1%}" for score in scores[::2])
    sys.stdout.write(f"in their place by mask ratio (chance {scores[0].chance:.1%}): {words}\n")
    rows = [asdict(score) for score in scores]
    save_figure(args.run_folder / "evaluation", "positions", picture, rows)
    return 0


def jigsaw(args: argparse.Namespace) -> int:
    """Take held-out images apart and put them together.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened, objective = _open(args)
        from megavis.evaluation.positions import jigsaw_rows

        rows: list[Any] = []
        accuracies = []
        for number, image in enumerate(_pictures(opened, args, args.num_images)):
            part, found = jigsaw_rows(
                opened.runner, objective, image, _RATIOS, seed=args.seed + number
            )
            rows += [[image.cpu().numpy(), *row] for row in part]
            accuracies.append(found)
    means = [sum(column) / len(column) for column in zip(*accuracies, strict=True)]
    words = ", ".join(f"{r}: {mean:.1%}" for r, mean in zip(_RATIOS, means, strict=True))
    return _write(args, "jigsaw", rows, f"in their place by mask ratio: {words}")


def mixture(args: argparse.Namespace) -> int:
    """Mix the patches of pairs of held-out images and let the model sort them.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened, objective = _open(args)
        from megavis.evaluation.positions import mixture_rows

        rows: list[Any] = []
        images = _pictures(opened, args, 2 * args.num_images)
        for number, pair in enumerate(images.split(2)):
            rows += mixture_rows(opened.runner, objective, pair, _RATIOS, seed=args.seed + number)
    return _write(args, "mixture", rows, f"{args.num_images} pairs, mask ratios {_RATIOS}")


def _open(args: argparse.Namespace) -> tuple[Run, Places]:
    opened = open_run(args.run_folder, step=args.step, device=args.device)
    return opened, opened.objective.places()


def _pictures(opened: Run, args: argparse.Namespace, count: int) -> Tensor:
    """Return held-out images of as many classes as there are: uint8 `[b, h, w, 3]`."""
    return read_in_turn(held_out_images(opened, args), count).inputs


def _write(args: argparse.Namespace, name: str, rows: Any, line: str) -> int:
    from megavis.sampling.grids import image_grid, save_png

    path: Path = args.run_folder / "evaluation" / f"{name}.png"
    save_png(path, image_grid(rows))
    sys.stdout.write(f"{line}\n{path}\n")
    return 0
