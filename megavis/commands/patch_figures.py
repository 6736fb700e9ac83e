"""`megavis figure patches` and `megavis figure completions`: what is predicted, and how well."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_device, add_run, add_step
from megavis.commands.kept_figure import keep_figure
from megavis.commands.opening import job_closed, open_held_out, open_run, read_in_turn
from megavis.commands.sample_options import refuse_noise_options
from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.data.dataset import ShardDataset
    from megavis.notebook import Run


def add_patch_figures(figures: Any) -> None:
    """Add both to the figures of `megavis figure`."""
    patches = figures.add_parser(
        "patches",
        help="prediction error by place of the order (DARL, Figures 10 to 14)",
        description="Predict every patch of held-out images from those before it, and draw the"
        " mean error over the places of the run's order and over the image.",
        epilog="example: megavis figure patches runs/darl_demo",
    )
    add_image_arguments(patches, num_images=512)
    patches.set_defaults(run=draw_patches)
    completions = figures.add_parser(
        "completions",
        help="completed lower halves, and their PSNR (DARL, Figure 7)",
        description="Complete held-out images from their upper halves, and compare with repeating"
        " the last row that was given: PSNR of the lower halves, of single completions and of their"
        " mean, which is the best guess by squared error. The picture shows the first eight:"
        " original, what was given, completions.",
        epilog="example: megavis figure completions runs/darl_demo --sampling-steps 20",
    )
    add_image_arguments(completions, num_images=64)
    completions.add_argument(
        "--sampling-steps", type=positive, help="from noise to a patch; default: the config's"
    )
    completions.add_argument(
        "--temperature", type=float, help="of the noise; default: the config's"
    )
    completions.add_argument("--seed", type=int, default=0, help="decides every draw")
    completions.add_argument("--completions", type=positive, default=3, help="shown of each image")
    completions.add_argument(
        "--draws", type=positive, default=8, help="of each image, for their mean"
    )
    completions.set_defaults(run=draw_completions)


def add_image_arguments(parser: argparse.ArgumentParser, *, num_images: int | None) -> None:
    """Add the run, its checkpoint, and which held-out images."""
    add_run(parser)
    parser.add_argument(
        "--images", metavar="FOLDER", help="shard folder; default: the run's data.validation"
    )
    parser.add_argument(
        "--num-images",
        type=positive,
        default=num_images,
        help="at most" + "; default: all" * (not num_images),
    )
    add_step(parser)
    add_device(parser)


def draw_patches(args: argparse.Namespace) -> int:
    """Measure and draw.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        from megavis.evaluation import patch_errors as measured

        if not isinstance(opened.objective, measured.ScoresPatches):
            name = opened.config.objective.name
            raise UserError(f"{name} does not predict the patches of an order one by one")
        errors = measured.measure_patches(
            opened.runner,
            opened.objective,
            held_out_images(opened, args),
            num_images=args.num_images,
        )
    picture = measured.draw_patch_errors(errors, name=args.run_folder.name)
    keep_figure(args.run_folder / "evaluation", "patches", picture, measured.patch_rows(errors))
    return 0


def draw_completions(args: argparse.Namespace) -> int:
    """Complete, compare and draw.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        return _complete(opened, args)


def _complete(opened: Run, args: argparse.Namespace) -> int:
    from megavis.evaluation.figures import write_table
    from megavis.evaluation.images.completions import score_completions
    from megavis.objectives.base import PatchByPatch
    from megavis.sampling.grids import save_png
    from megavis.sampling.patchwise import given_part, sample_patches
    from megavis.sampling.pictures import picture_of_patches

    objective = opened.objective
    if not isinstance(objective, PatchByPatch):
        raise UserError(f"{opened.config.objective.name} does not draw images patch by patch")
    refuse_noise_options(opened.objective, args)
    dataset = held_out_images(opened, args)
    originals = read_in_turn(dataset, args.num_images).inputs.to(opened.context.device)
    options = {
        "num_given": objective.num_tokens // 2,
        "num_steps": args.sampling_steps,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    given = given_part(objective, originals, options["num_given"])
    repeated = originals.repeat(args.draws, 1, 1, 1)
    completed = sample_patches(
        opened.runner, objective, num_images=len(repeated), originals=repeated, **options
    )
    scores = score_completions(originals, completed.unflatten(0, (args.draws, -1)), given)
    shown = picture_of_patches(
        opened.runner,
        objective,
        originals=originals[:8],
        num_images=min(8, len(originals)),
        num_completions=args.completions,
        **options,
    )
    folder = args.run_folder / "evaluation"
    save_png(folder / "completions.png", shown)
    table = write_table(folder / "completions.csv", scores.rows)
    sys.stdout.write(
        f"PSNR of the lower halves of {len(originals)} images: completed {scores.completed:.2f} dB,"
        f" mean of {args.draws} completions {scores.mean:.2f} dB,"
        f" last row repeated {scores.repeated:.2f} dB\n{folder / 'completions.png'}\n{table}\n"
    )
    return 0


def held_out_images(opened: Run, args: argparse.Namespace) -> ShardDataset:
    """Open the held-out images.

    Raises:
        UserError: there are none, or they do not fit the run.
    """
    return open_held_out(opened, args.images, option="--images")
