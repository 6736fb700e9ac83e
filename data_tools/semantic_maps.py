"""`maps semantic`: write images and maps with one class per pixel as shards of pairs.

A map is a PNG whose values are class numbers, as ADE20K's scene parsing benchmark publishes them
("Scene Parsing through ADE20K Dataset", Zhou et al., 2017): 0 for other pixels, then the classes in
the order of `objectInfo150.txt`. Maps of PASCAL VOC and Cityscapes have the first class at 0 and
void at 255: `--void 255`. In the shards, a class is one segment, numbered like the class.
"""

from __future__ import annotations

import argparse
import functools
import io
from pathlib import Path

import numpy as np
from PIL import Image

from data_tools.decode import RefusedImageError
from data_tools.image_shards import (
    TargetEncoder,
    add_quality_argument,
    pair_up,
    png_of_map,
)
from data_tools.jobs import add_job_arguments, run_job
from data_tools.sources import list_images
from data_tools.user_text import lines_of, read_names, read_text
from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import MAX_SEGMENTS

_NO_MAP = "label map: no PNG of one number a pixel"
_BIT_DEPTH = 24
"""Place of this byte in a PNG file."""
_BEYOND = "label map: number beyond the classes of --classes"


def add_semantic_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps semantic` to its parser."""
    parser.add_argument("images", type=Path, help="a folder of images, such as images/training")
    parser.add_argument(
        "maps", type=Path, help="their maps with the same names, such as annotations/training"
    )
    parser.add_argument(
        "--classes",
        type=Path,
        required=True,
        metavar="FILE",
        help="names of the classes, one a line, in the order of their numbers; or ADE20K's"
        " objectInfo150.txt",
    )
    parser.add_argument(
        "--void",
        type=int,
        choices=(0, 255),
        default=0,
        help="number of pixels without a class; the first class is 1 with 0, and 0 with 255",
    )
    add_quality_argument(parser)
    add_job_arguments(parser, stores=True)


def run_semantic(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    names = read_class_names(arguments.classes)
    target = {"kind": "panoptic", "class_names": names, "things": (False,) * len(names)}
    read_map = functools.partial(read_semantic, num_classes=len(names), void=arguments.void)
    read = functools.partial(png_of_map, read_map=read_map)
    source = pair_up(list_images(arguments.images), list_images(arguments.maps))
    encoder = TargetEncoder(arguments.quality, target, read)
    return run_job(source, encoder, arguments, label="maps")


def read_class_names(path: Path) -> tuple[str, ...]:
    """Return the names in a list, or in the last column of a table whose header ends in `Name`.

    Raises UserError if a name occurs twice, or there are too many.
    """
    header, *rows = lines_of(read_text(path)) or [(0, "")]
    if header[1].split("\t")[-1] == "Name":
        names = tuple(line.split("\t")[-1].strip() for _, line in rows)
    else:
        names = read_names(path)
    if len(names) > MAX_SEGMENTS:
        raise UserError(f"{path} has {len(names)} classes, over {MAX_SEGMENTS}")
    return names


def read_semantic(content: bytes, *, num_classes: int, void: int) -> np.ndarray:
    """Decode a map to class + 256 · segment, int64 `[h, w]`, 0 for void.

    Raises RefusedImageError if it is not a PNG with one number per pixel, or if a number is not a
    class.
    """
    try:
        picture = Image.open(io.BytesIO(content), formats=("PNG",))
        values = np.asarray(picture).astype(np.int64)
        if picture.mode == "L":  # Pillow scales greys of fewer than 8 bits to 255
            values //= 255 // (2 ** content[_BIT_DEPTH] - 1)
    except MemoryError:  # says nothing about the file
        raise
    except Exception:  # Pillow raises almost any exception on damaged bytes
        raise RefusedImageError(_NO_MAP) from None
    if values.ndim != 2:
        raise RefusedImageError(_NO_MAP)
    classes = values if void == 0 else np.where(values == void, 0, values + 1)
    if classes.max(initial=0) > num_classes:
        raise RefusedImageError(_BEYOND)
    return classes + 256 * classes
