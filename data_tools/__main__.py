"""`python -m data_tools VERB`: commands to write, check and show shards."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megavis.config.arguments import (
    ArgumentParser,
    accept_all_text,
    close_output,
    show_fatal_stacks,
)
from megavis.config.errors import NOT_ALLOWED, UserError, describe_os_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns 0 on success, 1 if `verify` finds an error or writing fails, 2 for a user's mistake or a
    missing permission, 130 if interrupted.
    """
    accept_all_text()
    show_fatal_stacks()
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        if unknown:
            arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        return _fail(str(error), code=2)
    except BrokenPipeError as error:
        return close_output(error)
    except OSError as error:
        return _fail(describe_os_error(error), code=2 if error.errno in NOT_ALLOWED else 1)
    except MemoryError:
        return _fail("not enough memory: run the same command again with more of it", code=1)
    except KeyboardInterrupt:
        return _fail("interrupted; finished work is kept", code=130)


@dataclass(frozen=True)
class Verb:
    """One command: one word, or two in a group of verbs.

    `module` is imported only when the command is used. Named after the last word are its functions
    `add_WORD_arguments`, which adds options, and `run_WORD`, which does the work and returns the
    exit code.
    """

    name: str
    description: str
    example: str
    module: str


VERBS = (
    Verb(
        "letters",
        "draw capital letters in matplotlib's fonts, with separate fonts for validation",
        "demo/letters --size 12",
        "letters",
    ),
    Verb(
        "photographs",
        "write crops of the photographs in scikit-image and scikit-learn",
        "photographs --size 64 --crops 4000 --validation-crops 500",
        "photographs",
    ),
    Verb(
        "palette fit",
        "fit a palette to the colours of images",
        "images/train --out palette.npy --num-colors 512",
        "palette",
    ),
    Verb(
        "palette grey",
        "write a palette of greys, whose tokens are the pixels of grey images",
        "--out grey.npy",
        "palette",
    ),
    Verb(
        "palette shards",
        "write images as shards of palette tokens",
        "images/train --palette palette.npy --out shards/train --size 32",
        "palette",
    ),
    Verb(
        "jpeg",
        "write images as shards of JPEG files",
        "images/train --out shards/train --size 32",
        "image_shards",
    ),
    Verb(
        "pairs",
        "write images and target images as shards of pairs",
        "images/train depth/train --out shards/depth --size 256",
        "image_shards",
    ),
    Verb(
        "scenes",
        "draw scenes of objects on a floor, with panoptic maps and depths",
        "demo/scenes --size 64 --images 4000",
        "scenes",
    ),
    Verb(
        "maps panoptic",
        "write images and panoptic maps in COCO's format as shards of pairs",
        "train2017 panoptic_train2017 panoptic_train2017.json --out shards/coco_panoptic/train",
        "label_maps",
    ),
    Verb(
        "maps semantic",
        "write images and maps of one class a pixel, such as ADE20K's, as shards of pairs",
        "images/training annotations/training --classes objectInfo150.txt --out shards/ade/train",
        "label_maps",
    ),
    Verb(
        "maps instances",
        "write images and objects with boxes and masks in COCO's format as shards of pairs",
        "train2017 annotations/instances_train2017.json --out shards/coco_instances/train",
        "instances",
    ),
    Verb(
        "maps depth",
        "write images and 16-bit depths as shards of pairs",
        "images/train depth/train --out shards/depth/train",
        "label_maps",
    ),
    Verb(
        "maps nyu",
        "write NYU Depth v2 as shards of pairs",
        "nyu_depth_v2_labeled.mat splits.mat --part train --out shards/nyu/train",
        "label_maps",
    ),
    Verb(
        "latents",
        "write images as shards of a VAE's means and scales",
        "images/train --tokenizer runs/givt_vae --out shards/latents --size 256",
        "encoded_shards",
    ),
    Verb(
        "ids",
        "write images as shards of a discrete tokenizer's ids",
        "images/train --tokenizer runs/vqgan --out shards/ids --size 256",
        "encoded_shards",
    ),
    Verb(
        "words",
        "synthesize spoken words into a folder like Speech Commands",
        "demo/words --voices 60 --held-out-voices 15",
        "words",
    ),
    Verb(
        "speech",
        "write a Speech Commands folder as shards of cepstral coefficients",
        "demo/words --out demo/speech",
        "speech",
    ),
    Verb(
        "filter",
        "select images of a web collection, and record why others are dropped",
        "web --out web_selection --min-side 128 --evaluation ILSVRC2012_img_val.tar",
        "filter_images",
    ),
    Verb(
        "merge",
        "merge shard folders of one kind",
        "shards/imagenet shards/web --out shards/both --samples-per-shard 10000",
        "reshard",
    ),
    Verb(
        "reshard",
        "copy a shard folder with another number of samples per shard",
        "shards/train --out shards/small --samples-per-shard 1000",
        "reshard",
    ),
    Verb(
        "index",
        "rebuild the index of finished shards from their JSON indexes",
        "shards/train --workers 8",
        "indexing",
    ),
    Verb(
        "verify",
        "read every byte of a shard folder and report errors",
        "demo/train",
        "inspection",
    ),
    Verb(
        "inspect",
        "write a contact sheet of a shard folder",
        "demo/train --out sheet.png",
        "inspection",
    ),
)
GROUPS = {
    "palette": "palette tokens: fit, grey, shards",
    "maps": "images with label maps or objects: panoptic, semantic, instances, depth, nyu",
}


def build_parser() -> ArgumentParser:
    """Return the parser of all commands; each has one example in its help."""
    parser = ArgumentParser(
        prog="python -m data_tools",
        description="Turn images into shards, and check them.",
        epilog="`python -m data_tools VERB --help` shows the options of a verb, and an example.",
    )
    words = parser.add_subparsers(metavar="VERB", required=True)
    inner = {}
    for verb in VERBS:
        group, _, name = verb.name.rpartition(" ")
        if group and group not in inner:
            made = words.add_parser(group, help=GROUPS[group])
            inner[group] = made.add_subparsers(metavar="VERB", required=True)
        _add(inner[group] if group else words, name, verb)
    return parser


def _add(words: argparse._SubParsersAction[ArgumentParser], name: str, verb: Verb) -> None:
    words.add_parser(
        name,
        help=verb.description,
        description=verb.description.capitalize() + ".",
        epilog=f"example: python -m data_tools {verb.name} {verb.example}",
        fill=partial(_add_options, verb),
    )


def _add_options(verb: Verb, parser: ArgumentParser) -> None:
    module = importlib.import_module(f"data_tools.{verb.module}")
    word = verb.name.split()[-1]
    getattr(module, f"add_{word}_arguments")(parser)
    parser.set_defaults(run=getattr(module, f"run_{word}"))


def _fail(text: str, *, code: int) -> int:
    sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
