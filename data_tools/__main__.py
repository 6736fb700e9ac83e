"""`python -m data_tools VERB`: the commands that make, check and show shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data_tools import (
    contact_sheet,
    filter_images,
    id_shards,
    jpeg_shards,
    latent_shards,
    letters,
    pair_shards,
    palette_fit,
    palette_shards,
    photographs,
    reshard,
    speech_shards,
    spoken_words,
    verify,
)
from megavis.config.arguments import ArgumentParser
from megavis.config.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 when all is well, 1 when `verify` finds something wrong or the disk fails, 2 for a
        user's mistake, 130 when interrupted.
    """
    try:
        arguments = build_parser().parse_args(argv)
        return arguments.run(arguments)
    except UserError as error:
        return _fail(str(error), code=2)
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), code=1)
    except KeyboardInterrupt:
        return _fail("interrupted; what is finished is kept", code=130)


@dataclass(frozen=True)
class Verb:
    """One command.

    Attributes:
        name: one word, or two of a group of verbs.
        description: what it does, for `--help`.
        example: its options in a typical call.
        add_arguments: adds its options to its parser.
        run: does it; returns the exit code.
    """

    name: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


VERBS = (
    Verb(
        "letters",
        "draw capital letters in the fonts that matplotlib ships; validation by fonts of its own",
        "demo/letters --size 12",
        letters.add_arguments,
        letters.run,
    ),
    Verb(
        "photographs",
        "write crops of photographs that scikit-image and scikit-learn ship",
        "photographs --size 64 --crops 4000 --validation-crops 500",
        photographs.add_arguments,
        photographs.run,
    ),
    Verb(
        "palette fit",
        "fit a palette to the colours of images",
        "images/train --out palette.npy --num-colors 512",
        palette_fit.add_arguments,
        palette_fit.run,
    ),
    Verb(
        "palette shards",
        "write images as shards of palette tokens",
        "images/train --palette palette.npy --out shards/train --size 32",
        palette_shards.add_arguments,
        palette_shards.run,
    ),
    Verb(
        "jpeg",
        "write images as shards of JPEG files",
        "images/train --out shards/train --size 32",
        jpeg_shards.add_arguments,
        jpeg_shards.run,
    ),
    Verb(
        "pairs",
        "write images and what is to be predicted from them as shards",
        "images/train depth/train --out shards/depth --size 256",
        pair_shards.add_arguments,
        pair_shards.run,
    ),
    Verb(
        "latents",
        "write images as shards of a VAE's means and scales",
        "images/train --tokenizer runs/givt_vae --out shards/latents --size 256",
        latent_shards.add_arguments,
        latent_shards.run,
    ),
    Verb(
        "ids",
        "write images as shards of a discrete tokenizer's ids",
        "images/train --tokenizer runs/vqgan --out shards/ids --size 256",
        id_shards.add_arguments,
        id_shards.run,
    ),
    Verb(
        "words",
        "let a speech synthesiser say words, into a folder like Speech Commands",
        "demo/words --voices 60 --held-out-voices 15",
        spoken_words.add_arguments,
        spoken_words.run,
    ),
    Verb(
        "speech",
        "write a Speech Commands folder as shards of cepstral coefficients",
        "demo/words --out demo/speech",
        speech_shards.add_arguments,
        speech_shards.run,
    ),
    Verb(
        "filter",
        "decide which images of the web take part, and write down why others do not",
        "web --out web_selection --min-side 128 --evaluation ILSVRC2012_img_val.tar",
        filter_images.add_arguments,
        filter_images.run,
    ),
    Verb(
        "merge",
        "copy shard folders of one kind into one",
        "shards/imagenet shards/web --out shards/both --samples-per-shard 10000",
        reshard.add_merge_arguments,
        reshard.run,
    ),
    Verb(
        "reshard",
        "copy a shard folder with another number of samples a shard",
        "shards/train --out shards/small --samples-per-shard 1000",
        reshard.add_reshard_arguments,
        reshard.run,
    ),
    Verb(
        "verify",
        "read every byte of a shard folder and name what is wrong",
        "demo/train",
        verify.add_arguments,
        verify.run,
    ),
    Verb(
        "inspect",
        "write a contact sheet of a shard folder",
        "demo/train --out sheet.png",
        contact_sheet.add_arguments,
        contact_sheet.run,
    ),
)
GROUPS = {"palette": "palette tokens: fit, shards"}


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
    parser = words.add_parser(
        name,
        help=verb.description,
        description=verb.description.capitalize() + ".",
        epilog=f"example: python -m data_tools {verb.name} {verb.example}",
    )
    verb.add_arguments(parser)
    parser.set_defaults(run=verb.run)


def _fail(text: str, *, code: int) -> int:
    sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
