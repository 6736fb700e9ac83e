"""`megavis figure patches`, `completions` and `reconstructions`: what is predicted, how well."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from megavis.commands.arguments import add_device, add_run, add_step
from megavis.commands.opening import job_closed, open_held_out, open_run, read_in_turn
from megavis.commands.sampling_options import spelled
from megavis.commands.save_figure import save_figure
from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.data.loading.dataset import ShardDataset
    from megavis.notebook import Run


def add_patch_figures(figures: Any) -> None:
    """Add them to the figures of `megavis figure`."""
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
    reconstructions = figures.add_parser(
        "reconstructions",
        help="hidden patches predicted from the others, and their PSNR",
        description="Hide patches of held-out images as training does and predict them. Prints the"
        " PSNR of what was hidden, and that of giving each hidden patch its true mean colour. The"
        " picture shows the first eight: what was visible, the prediction, the original.",
        epilog="example: megavis figure reconstructions runs/mae_demo",
    )
    add_image_arguments(reconstructions, num_images=256)
    reconstructions.set_defaults(run=draw_reconstructions)


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

        errors = measured.measure_patches(
            opened.runner,
            opened.objective.backbone.composition(),
            held_out_images(opened, args),
            num_images=args.num_images,
        )
    picture = measured.draw_patch_errors(errors, name=args.run_folder.name)
    save_figure(args.run_folder / "evaluation", "patches", picture, measured.patch_rows(errors))
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
    import torch

    from megavis.evaluation.figures import write_table
    from megavis.evaluation.images.completions import score_completions
    from megavis.sampling.grids import completion_grid, save_png
    from megavis.sampling.pictures import pixels_of

    options = {"sampling_steps": args.sampling_steps, "temperature": args.temperature}
    sampler = opened.sampler(seed=args.seed, spell=spelled, **options)
    dataset = held_out_images(opened, args)
    inputs = read_in_turn(dataset, args.num_images).inputs.to(opened.context.device)
    count, num_given = len(inputs), sampler.paper.num_tokens // 2
    draws = max(args.draws, args.completions)
    tokens = sampler.draw(count * draws, originals=inputs, num_given=num_given)
    completed = sampler.to_images(tokens).unflatten(0, (draws, count))
    originals = sampler.to_images(sampler.paper.tokens_of(inputs))
    shown = [images.cpu().numpy() for images in (originals, *completed[: args.completions])]
    given = pixels_of(sampler.given_part(count, num_given), shown[0])
    scores = score_completions(originals, completed[: args.draws], torch.from_numpy(given))
    first, *columns = (images[:8] for images in shown)
    folder = args.run_folder / "evaluation"
    save_png(folder / "completions.png", completion_grid(first, given[:8], columns))
    table = write_table(folder / "completions.csv", scores.rows)
    sys.stdout.write(
        f"PSNR of the lower halves of {count} images: completed {scores.completed:.2f} dB,"
        f" mean of {args.draws} completions {scores.mean:.2f} dB,"
        f" last row repeated {scores.repeated:.2f} dB\n{folder / 'completions.png'}\n{table}\n"
    )
    return 0


def draw_reconstructions(args: argparse.Namespace) -> int:
    """Predict, compare and draw.

    Raises:
        UserError: the run, its data or its objective does not allow it.
    """
    with job_closed():
        opened = open_run(args.run_folder, step=args.step, device=args.device)
        return _reconstruct(opened, args)


def _reconstruct(opened: Run, args: argparse.Namespace) -> int:
    import torch

    from megavis.evaluation.figures import write_table
    from megavis.evaluation.images.filling import score_filling
    from megavis.evaluation.reconstructions import reconstruct
    from megavis.sampling.grids import hide, image_grid, save_png
    from megavis.sampling.pictures import pixels_of

    if opened.objective.classification() is not None:
        raise UserError("a fine-tuned run predicts classes; name the run that it started from")
    paper = opened.objective.backbone.composition()
    dataset = held_out_images(opened, args)
    batch = read_in_turn(dataset, args.num_images).to(opened.context.device)
    found = reconstruct(opened.runner, paper, batch, opened.folder)
    originals, made = (each.cpu().numpy() for each in (found.originals, found.made))
    hidden = pixels_of(found.hidden, originals)
    rows = [
        {"hidden": name, **score_filling(found.originals, images, torch.from_numpy(hidden))}
        for name, images in (("predicted", found.made), ("their mean colour", found.flat))
    ]
    columns = (hide(originals, ~hidden), made, originals)
    folder = args.run_folder / "evaluation"
    save_png(folder / "reconstructions.png", image_grid([*zip(*columns, strict=True)][:8]))
    table = write_table(folder / "reconstructions.csv", rows)
    words = ", ".join(f"{row['hidden']} {row['psnr']:.2f} dB" for row in rows)
    sys.stdout.write(
        f"PSNR of the hidden patches of {len(batch)} images: {words}\n"
        f"{folder / 'reconstructions.png'}\n{table}\n"
    )
    return 0


def held_out_images(opened: Run, args: argparse.Namespace) -> ShardDataset:
    """Open the held-out images.

    Raises:
        UserError: there are none, or they do not fit the run.
    """
    return open_held_out(opened, args.images, option="--images")
