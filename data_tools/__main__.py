"""`python -m data_tools VERB`: the commands that make, check and show shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from data_tools import (
    contact_sheet,
    filter_images,
    jpeg_shards,
    palette_fit,
    palette_shards,
    photographs,
    reshard,
    verify,
)
from megavis.config.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 when all is well, 1 when `verify` finds something wrong or the disk fails, 2 for a
        user's mistake, 130 when interrupted. argparse itself exits with 2 on unknown options.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        return _fail(str(error), code=2)
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), code=1)
    except KeyboardInterrupt:
        return _fail("interrupted; what is finished is kept", code=130)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each has one example in its help."""
    parser = argparse.ArgumentParser(
        prog="python -m data_tools", description="Turn images into shards, and check them."
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add(
        verbs,
        "photographs",
        "write crops of photographs that scikit-image and scikit-learn ship",
        "photographs demo/images --size 64 --crops 4000 --validation-crops 500",
        photographs.add_arguments,
        photographs.run,
    )
    palette = verbs.add_parser("palette", help="palette tokens: fit, shards")
    palette_verbs = palette.add_subparsers(metavar="VERB", required=True)
    _add(
        palette_verbs,
        "fit",
        "fit a palette to the colours of images",
        "palette fit demo/images/train --out demo/palette.npy --num-colors 512",
        palette_fit.add_arguments,
        palette_fit.run,
    )
    _add(
        palette_verbs,
        "shards",
        "write images as shards of palette tokens",
        "palette shards demo/images/train --palette demo/palette.npy --out demo/train --size 32",
        palette_shards.add_arguments,
        palette_shards.run,
    )
    _add(
        verbs,
        "jpeg",
        "write images as shards of JPEG files",
        "jpeg demo/images/train --out demo/jpeg_train --size 32",
        jpeg_shards.add_arguments,
        jpeg_shards.run,
    )
    _add(
        verbs,
        "filter",
        "decide which images of the web take part, and write down why others do not",
        "filter web --out web_selection --min-side 128 --evaluation ILSVRC2012_img_val.tar",
        filter_images.add_arguments,
        filter_images.run,
    )
    _add(
        verbs,
        "merge",
        "copy shard folders of one kind into one",
        "merge shards/imagenet shards/web --out shards/both --samples-per-shard 10000",
        reshard.add_merge_arguments,
        reshard.run,
    )
    _add(
        verbs,
        "reshard",
        "copy a shard folder with another number of samples a shard",
        "reshard shards/train --out shards/small --samples-per-shard 1000",
        reshard.add_reshard_arguments,
        reshard.run,
    )
    _add(
        verbs,
        "verify",
        "read every byte of a shard folder and name what is wrong",
        "verify demo/train",
        verify.add_arguments,
        verify.run,
    )
    _add(
        verbs,
        "inspect",
        "write a contact sheet of a shard folder",
        "inspect demo/train --out sheet.png",
        contact_sheet.add_arguments,
        contact_sheet.run,
    )
    return parser


def _add(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    description: str,
    example: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> None:
    parser = verbs.add_parser(
        name,
        help=description,
        description=description.capitalize() + ".",
        epilog=f"example: python -m data_tools {example}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def _fail(text: str, *, code: int) -> int:
    sys.stderr.write(f"error: {text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
