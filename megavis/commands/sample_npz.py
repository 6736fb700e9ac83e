"""`megavis sample --npz`: many images of any run that draws some, for evaluation."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megavis.commands.sampling_options import chosen_options, spelled
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.notebook import Run


def write_samples(opened: Run, args: argparse.Namespace) -> None:
    """Draw --num-images images from nothing into `args.npz`.

    Raises:
        UserError: the run draws no images so, or the file was begun with other settings.
    """
    from megavis.sampling.npz import write_npz

    if args.prefix:
        raise UserError("--npz holds images from nothing; leave --prefix out")
    options = chosen_options(args)
    sampler = opened.sampler(seed=args.seed, spell=spelled, **options)
    sampler.paper.check_images(opened.folder)
    write_npz(
        args.npz,
        sampler.from_nothing,
        num_images=args.num_images,
        batch_size=args.batch_size,
        context=opened.context,
        settings={"step": opened.step, "seed": args.seed, **options},
    )
    if opened.context.is_main:
        sys.stdout.write(f"{args.npz}\n")
