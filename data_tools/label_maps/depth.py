"""`maps depth` and `maps nyu`: write images and depth maps as shards of pairs.

Depth maps are folders of 16-bit PNG files, or NYU Depth v2 as published: a .mat file (HDF5) with
the labelled part, and another with its split into training and test images.
"""

from __future__ import annotations

import argparse
import functools
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import RefusedImageError
from data_tools.jobs import add_job_arguments, run_job
from data_tools.jpeg_shards import add_quality_argument, check_quality
from data_tools.labelled.array_files import read_mat
from data_tools.labelled.data_set import hdf5_array, ppm
from data_tools.pair_shards import LabelMapEncoder, PairFile, pair_up
from data_tools.sources import FileSource, SourceFile, list_images
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import join
from megavis.data.codecs.label_maps import MAX_NUMBER, UNITS_A_METRE

NYU_ROWS, NYU_COLUMNS = slice(54, 480), slice(41, 601)
"""NYU's evaluation crop: 426 × 560 pixels."""
_TARGET = {"kind": "depth"}
_INDICES = {"train": "trainNdxs", "test": "testNdxs"}
_UNREADABLE = "depth: not a 16-bit PNG"
_IMPOSSIBLE = "depth: negative or not a number"
_TOO_FAR = f"depth: above {MAX_NUMBER // UNITS_A_METRE} m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps depth` to its parser."""
    parser.add_argument("images", type=Path, help="a folder of images")
    parser.add_argument(
        "depths", type=Path, help="a folder of 16-bit PNG files with the same names; 0: unknown"
    )
    parser.add_argument(
        "--units-per-metre", type=float, default=1000.0, help="of the PNG files; 1000: millimetres"
    )
    add_quality_argument(parser)
    add_job_arguments(parser)


def add_nyu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps nyu` to its parser."""
    parser.add_argument("labelled", type=Path, help="nyu_depth_v2_labeled.mat")
    parser.add_argument("splits", type=Path, help="splits.mat")
    parser.add_argument("--part", choices=tuple(_INDICES), required=True, help="which images")
    parser.add_argument(
        "--evaluation-crop",
        action="store_true",
        help="keep the 426 x 560 pixels at row 54, column 41, where depths are evaluated",
    )
    add_quality_argument(parser)
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folder from two folders. Raises UserError and OSError."""
    check_quality(arguments.quality)
    if arguments.units_per_metre <= 0:
        raise UserError("--units-per-metre must be above 0")
    pairs = pair_up(list_images(arguments.images), list_images(arguments.depths))
    read = functools.partial(_read_folders, units=arguments.units_per_metre)
    source = replace(pairs, read=read)
    return run_job(source, _encoder(arguments), arguments, label="depth")


def run_nyu(arguments: argparse.Namespace) -> int:
    """Write the shard folder of NYU Depth v2. Raises UserError and OSError."""
    check_quality(arguments.quality)
    source = list_nyu(
        arguments.labelled, arguments.splits, arguments.part, cuts=arguments.evaluation_crop
    )
    return run_job(source, _encoder(arguments), arguments, label="depth")


def _encoder(arguments: argparse.Namespace) -> LabelMapEncoder:
    return LabelMapEncoder(arguments.quality, _TARGET, read_depth)


def _read_folders(file: SourceFile, root: Path, *, units: float) -> bytes:
    """Return image and depth as one payload. Raises OSError and RefusedImageError."""
    assert isinstance(file, PairFile)
    try:
        image = Image.open(file.target, formats=("PNG",))
        values = np.asarray(image)
    except Exception:  # Pillow raises almost any exception on damaged bytes
        raise RefusedImageError(_UNREADABLE) from None
    if not image.mode.startswith("I"):
        raise RefusedImageError(_UNREADABLE)
    return join(file.read(root), _as_bytes(values / units))


def _as_bytes(metres: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, metres.astype(np.float64))
    return content.getvalue()


def read_depth(content: bytes) -> np.ndarray:
    """Read depths in metres and return tenths of a millimetre, int64 `[h, w]`; 0: unknown.

    Raises RefusedImageError if a depth is negative, not a number, or too large.
    """
    metres = np.load(io.BytesIO(content), allow_pickle=False)
    if not np.isfinite(metres).all() or (metres < 0).any():
        raise RefusedImageError(_IMPOSSIBLE)
    numbers: np.ndarray = (metres * UNITS_A_METRE).round().astype(np.int64)
    if numbers.max(initial=0) > MAX_NUMBER:
        raise RefusedImageError(_TOO_FAR)
    return numbers


@dataclass(frozen=True, slots=True)
class NyuFile(SourceFile):
    """An image in the labelled file; `offset` is its index."""

    cuts: bool = False


def list_nyu(labelled: Path, splits: Path, part: str, *, cuts: bool) -> FileSource:
    """Return the images of one part. Raises UserError if the two files do not match."""
    images, depths = (_array(labelled, name) for name in ("images", "depths"))
    if images.ndim != 4 or images.shape[1] != 3 or depths.shape != (
        images.shape[0], *images.shape[2:]
    ):  # fmt: skip
        raise UserError(
            f"{labelled} has images {list(images.shape)} and depths {list(depths.shape)}: it is"
            " another file"
        )
    numbers = np.atleast_1d(read_mat(splits, _INDICES[part])).reshape(-1).astype(int)
    if numbers.min(initial=1) < 1 or numbers.max(initial=1) > len(images):
        raise UserError(f"{splits} lists images that {labelled} does not have")
    files = [
        NyuFile(f"{part}/{number:04d}", -1, 0, labelled.name, number - 1, cuts=cuts)
        for number in numbers.tolist()
    ]
    return FileSource.of(
        files,
        description=f"NYU Depth v2, {part}" + (", evaluation crop" if cuts else ""),
        root=labelled.parent,
        classes=(),
        extra=f"{labelled.stat().st_size} {cuts}",
        read=_read_nyu,
    )


def _array(path: Path, name: str) -> Any:
    return hdf5_array(path, name, wanted="a labelled file of NYU Depth v2")


def _read_nyu(file: SourceFile, root: Path) -> bytes:
    assert isinstance(file, NyuFile)
    path = root / file.path
    # MATLAB's dimensions are reversed here.
    image = np.asarray(_array(path, "images")[file.offset]).transpose(2, 1, 0)
    depth = np.asarray(_array(path, "depths")[file.offset]).T
    if file.cuts:
        image, depth = image[NYU_ROWS, NYU_COLUMNS], depth[NYU_ROWS, NYU_COLUMNS]
    return join(ppm(np.ascontiguousarray(image)), _as_bytes(depth))
