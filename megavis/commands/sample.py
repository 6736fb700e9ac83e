"""`megavis sample`: generate or complete images with a run, as a PNG."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.commands.opening import (
    layout_job,
    network_identity,
    open_held_out,
    open_run,
    open_shards,
)
from megavis.commands.options.shared import chosen_options, refuse_options, spelled
from megavis.composition.model import generator_of
from megavis.config.errors import UserError, counted
from megavis.data.format.manifest import MANIFEST_NAME, PALETTE_NAME
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import Batch, read_batch, read_round_robin
from megavis.evaluation.images.results import MomentsResult
from megavis.evaluation.images.set_metrics import compare, largest_differences
from megavis.notebook import Run
from megavis.sampling.pictures import Gallery, picture, picture_of_rounds, save_png, write_npz
from megavis.sampling.sampler import Sampler
from megavis.tokenizers.palette import Palette


def default_precision(device: torch.device) -> str:
    """Return the precision of generation on a device: decoding is bound by reading weights."""
    return "bf16" if device.type == "cuda" else "float32"


def run(args: argparse.Namespace) -> int:
    """Generate images and write the grid."""
    with layout_job(args) as context:
        precision = args.precision or default_precision(context.device)
        opened = open_run(args.run_folder, step=args.step, precision=precision)
        try:
            pixels = _draw(opened, args)
        except torch.OutOfMemoryError:
            batch = "a batch" if args.batch_size is None else f"a batch of {args.batch_size}"
            raise UserError(
                f"{batch} does not fit into the memory of {context.device}; give a smaller"
                " --batch-size"
            ) from None
        kind = "completions" if args.prefix else "samples"
        out = args.out or opened.folder / "samples" / f"{kind}-{opened.step:08d}.png"
        if context.is_main and pixels is not None:
            save_png(out, pixels)
            sys.stdout.write(f"{out}\n")
    return 0


def check_together(args: argparse.Namespace, *, reads_images: bool) -> None:
    """Reject options that do not apply together; `reads_images`: images are made from images."""
    classes, shown = ("--classes", "--per-class", "--then-classes"), ("--moments", "--show-rounds")
    if args.npz is not None:
        to = "to --npz, which writes --num-images images, cycling through the classes"
        refuse_options(args, ("--out", "--completions", "--images", *classes, *shown), to)
    if args.moments:
        drawn = ("--completions", "--prefix", *classes, "--show-rounds")
        refuse_options(args, drawn, "to --moments, which writes no image")
    elif not args.prefix and not reads_images:
        refuse_options(args, ("--completions", "--images"), "without --prefix")
    if args.show_rounds:
        refuse_options(args, ("--then-classes", "--prefix"), "to --show-rounds")
    if args.classes is None:
        refuse_options(args, ("--per-class", "--then-classes"), "without --classes")
    else:
        to = "to --classes; --per-class sets the number of each"
        refuse_options(args, ("--num-images", "--prefix"), to)


def _draw(opened: Run, args: argparse.Namespace) -> Any:
    """Return the grid for the options, uint8 `[H, W, 3]`, or None if a file was written."""
    if opened.objective.reconstructs:
        return _reconstructions(opened, args)
    model = generator_of(opened.objective)
    names = model.condition.names
    continues = model.schedule.needs_given and args.npz is None and not args.moments
    check_together(args, reads_images=continues or "image" in names)
    if continues:
        refuse_options(
            args, ("--classes", "--show-rounds"), "to this run, which continues --images"
        )
        args.prefix = args.prefix or model.default_share
    if args.npz is not None:
        return write_samples(opened, args)
    options = chosen_options(args)
    sampler = opened.sampler(seed=args.seed, spell=spelled, **options)
    if args.moments:
        return compare_moments(opened, args, sampler)
    # Reject before any work is done.
    sampler.model.check_images(opened.folder)
    conditions, later, layout = _conditions(opened, args, sampler.model.condition.names)
    if args.show_rounds:
        count = args.num_images if conditions is None else len(conditions["labels"])
        usual = sampler.model.condition.defaults(count, None)
        return picture_of_rounds(sampler, usual if conditions is None else conditions, count)
    return _picture(opened, args, options, conditions=conditions, later=later, **layout)


def _picture(
    opened: Run, args: argparse.Namespace, options: Mapping[str, Any], **layout: Any
) -> Any:
    model = generator_of(opened.objective)
    own = model.schedule.columns if args.prefix else ({},)
    columns = [{**column, **options} for column in own]
    # The chosen options may leave no difference between the columns.
    different = [column for i, column in enumerate(columns) if column not in columns[:i]]
    samplers = [opened.sampler(seed=args.seed, spell=spelled, **each) for each in different]
    reads_images = "image" in model.condition.names
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
    opened: Run, args: argparse.Namespace, names: tuple[str, ...]
) -> tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None, dict[str, Any]]:
    """Return conditions for each image and for its second half, and further layout of the grid."""
    if args.classes is None:
        return None, None, {}
    if "labels" not in names or "image" in names:
        raise UserError("--classes does not apply to this run: it has no classes")

    def labels(classes: list[int]) -> Mapping[str, Tensor]:
        return {"labels": torch.tensor(classes).repeat_interleave(args.per_class)}

    classes = _numbers(opened, "--classes", args.classes)
    if args.then_classes is None:
        return labels(classes), None, {"num_columns": args.per_class}
    then_classes = _numbers(opened, "--then-classes", args.then_classes)
    if len(then_classes) != len(classes):
        raise UserError("--then-classes needs as many classes as --classes")
    # Equal classes begin with the same halves, and stand in one row if there are as many of each.
    copies = range(args.per_class)
    first = [classes.index(each) * args.per_class + copy for each in classes for copy in copies]
    runs = [len([*run]) for _, run in itertools.groupby(classes)]
    columns = args.per_class * (runs[0] if len({*runs}) == 1 else 1)
    layout = {"num_columns": columns, "first_halves": torch.tensor(first)}
    return labels(classes), labels(then_classes), layout


def _numbers(opened: Run, option: str, classes: Sequence[str]) -> list[int]:
    """Return the labels of classes given by number or by name."""
    numbers = {name: label for label, name in enumerate(opened.classes)}
    found = []
    for word in map(str.strip, classes):
        # Numbers come first, also where names are numbers; -1 is no class.
        if re.fullmatch("-?[0-9]+", word):
            found.append(int(word))
        elif word in numbers:
            found.append(numbers[word])
        else:
            known = "it records no names of classes: give numbers"
            if numbers:
                some = ", ".join(opened.classes[:5]) + ", ..." * (len(numbers) > 5)
                known = f"its {counted(len(numbers), 'class', 'classes')} are {some}"
            raise UserError(f"{option}: this run has no class {word!r}; {known}")
    try:
        condition = generator_of(opened.objective).condition
        condition.given({"labels": torch.tensor(found)}, len(found), torch.device("cpu"))
    except UserError as error:
        raise UserError(f"{option}: {error}") from None
    return found


def _reconstructions(opened: Run, args: argparse.Namespace) -> Any:
    name = opened.config.objective.name
    others = ["--prefix", "--completions", "--npz", "--classes", "--moments", "--show-rounds"]
    others += [spelled(option) for option in chosen_options(args)]
    refuse_options(args, others, f"to this run of {name}, which reconstructs --images")
    gallery = Gallery(opened.objective, opened.folder)
    examples = None
    if args.images is not None or opened.config.data.validation is not None:
        examples = _held_out(opened, args)
    return gallery.plot(opened.inference, examples, num_images=args.num_images)


def _held_out(opened: Run, args: argparse.Namespace) -> Batch:
    """Return held-out images, cycling through the classes."""
    dataset = open_held_out(opened, args.images, option="--images")
    return read_round_robin(dataset, args.num_images).to(opened.context.device)


def write_samples(opened: Run, args: argparse.Namespace) -> None:
    """Generate --num-images unconditional images into `args.npz`."""
    if args.prefix:
        raise UserError("--npz holds unconditional images; omit --prefix")
    options = chosen_options(args)
    sampler = opened.sampler(seed=args.seed, spell=spelled, **options)
    sampler.model.check_images(opened.folder)
    write_npz(
        args.npz,
        sampler.balanced_images,
        num_images=args.num_images,
        batches=sampler.batches(args.batch_size),
        settings={**_network_settings(opened), "seed": args.seed, **options},
    )
    if opened.context.is_main:
        sys.stdout.write(f"{args.npz}\n")


def _network_settings(opened: Run) -> dict[str, Any]:
    """Return what identifies the network of generated images and their decoder."""
    identity = network_identity(opened)
    palette = opened.folder / PALETTE_NAME
    colors = Palette.load(palette).sha256 if palette.exists() else None
    content = json.dumps([identity, colors], sort_keys=True)
    return {
        "run": opened.config.name,
        "step": opened.step,
        "precision": identity["precision"],
        "network": hashlib.sha256(content.encode()).hexdigest(),
    }


def compare_moments(opened: Run, args: argparse.Namespace, sampler: Sampler) -> None:
    """Compare generated with held-out latents and, for reference, training with held-out ones."""
    dataset = open_held_out(opened, args.images, option="--images")
    held_out, labels = _stored_latents(opened, dataset, args.num_images)
    drawn = sampler.sample(len(labels), conditions={"labels": labels}, batch_size=args.batch_size)
    found = {**chosen_options(args), **compare(drawn.cpu(), held_out)}
    differences = {"drawn": found["largest_difference"]}
    trained_on = opened.config.data.train
    if isinstance(trained_on, str) and Path(trained_on, MANIFEST_NAME).exists():
        seen, _ = _stored_latents(opened, open_shards(opened, trained_on), args.num_images)
        found["training_difference"] = largest_differences(seen, held_out)
        differences["of training"] = found["training_difference"]
    if opened.context.is_main:
        name = f"moments-{opened.step:08d}.json"
        path = args.out or opened.folder / "evaluation" / name
        sys.stdout.write("largest difference from held-out latents over the channels\n")
        for name, moments in differences.items():
            words = ", ".join(f"{moment} {value:.3f}" for moment, value in moments.items())
            sys.stdout.write(f"  {name}: {words}\n")
        MomentsResult.parse(found).write(path)
        sys.stdout.write(f"{path}\n")


def _stored_latents(opened: Run, dataset: ShardDataset, count: int) -> tuple[Tensor, Tensor]:
    """Return latents `[b, c, h, w]`, evenly spaced over the shards, and their labels."""
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), count)).astype(np.int64)
    batch = read_batch(dataset, places, places)
    latents = generator_of(opened.objective).tokens_of(batch.inputs, batch.sample_index)
    if latents.ndim != 4 or not latents.is_floating_point():
        raise UserError(
            f"--moments is for latents; runs of {opened.config.objective.name} generate none"
        )
    return latents, batch.labels
