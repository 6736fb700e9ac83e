"""`maps panoptic`, `semantic`, `depth`, `nyu`: write images and label maps as shards of pairs.

Panoptic maps are in COCO's format: a JSON file lists images, annotations and categories; the map of
an image is a PNG whose pixels encode the id of a segment as R + 256 G + 65536 B, with 0 for
unlabelled pixels. Classes are numbered from 1 in the order of the categories, segments from 1 in
the order of the annotation.

A semantic map is a PNG whose values are class numbers, as ADE20K's scene parsing benchmark
publishes them ("Scene Parsing through ADE20K Dataset", Zhou et al., 2017): 0 for other pixels, then
the classes in the order of `objectInfo150.txt`. Maps of PASCAL VOC and Cityscapes have the first
class at 0 and void at 255: `--void 255`. In the shards, a class is one segment, numbered like it.

Depth maps are folders of 16-bit PNG files, or NYU Depth v2 as published: a .mat file (HDF5) with
the labelled part, and another with its split into training and test images.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import BIT_DEPTH, RefusedImageError
from data_tools.image_shards import (
    PairFile,
    TargetEncoder,
    add_quality_argument,
    pair_up,
    png_of_map,
)
from data_tools.jobs import add_job_arguments, run_job
from data_tools.labelled.array_files import read_mat
from data_tools.labelled.data_set import hdf5_array, ppm
from data_tools.sources import FileSource, SourceFile, list_images, listed_size_and_fault, read_file
from data_tools.user_text import lines_of, read_names, read_text
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import DamagedImageError, decode_png, join, split
from megavis.data.codecs.label_maps import MAX_NUMBER, MAX_SEGMENTS, UNITS_A_METRE, to_numbers

_NO_IMAGE = "map without an image in the JSON file"
_NO_MAP = "image without an annotation"
_UNREADABLE = "label map: damaged, or no PNG"
_UNKNOWN = "label map: id that its annotation does not list"
_EMPTY = "label map: listed segment without a pixel"
_TOO_MANY = f"label map: more than {MAX_SEGMENTS} segments"
_TWICE = "label map: id listed twice"


def add_panoptic_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps panoptic` to its parser."""
    parser.add_argument("images", type=Path, help="folder of the images, such as train2017")
    parser.add_argument("maps", type=Path, help="folder of their maps, such as panoptic_train2017")
    parser.add_argument("annotations", type=Path, help="JSON file, such as panoptic_train2017.json")
    add_quality_argument(parser)
    add_job_arguments(parser, stores=True)


def run_panoptic(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    source, target = list_panoptic(arguments.images, arguments.maps, arguments.annotations)
    read = functools.partial(png_of_map, read_map=read_panoptic)
    encoder = TargetEncoder(arguments.quality, target, read)
    return run_job(source, encoder, arguments, label="panoptic")


@dataclass(frozen=True, slots=True)
class PanopticFile(SourceFile):
    """An image with the path of its map and its segments as JSON, `[[id, class, crowd], ...]`."""

    map_path: str = ""
    segments: str = "[]"


def list_panoptic(images: Path, maps: Path, annotations: Path) -> tuple[FileSource, dict[str, Any]]:
    """Return the images with their maps, and the manifest's description of the maps."""
    for folder in (images, maps):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
    content = read_json(annotations)
    try:
        categories = by_id(content, "categories", annotations)
        classes = {key: number for number, key in enumerate(categories, start=1)}
        target = {
            "kind": "panoptic",
            "class_names": tuple(each["name"] for each in categories.values()),
            "things": tuple(bool(each["isthing"]) for each in categories.values()),
        }
        images_by_id = by_id(content, "images", annotations)
        names = {key: each["file_name"] for key, each in images_by_id.items()}
        files = [_file(each, names, classes, images, maps) for each in content["annotations"]]
        described = {each["image_id"] for each in content["annotations"]}
        files += [
            SourceFile(name, -1, 0, refused=_NO_MAP)
            for number, name in names.items()
            if number not in described
        ]
    except (KeyError, TypeError) as error:
        what = what_is_wrong(error)
        raise UserError(f"{annotations} is not a JSON file of panoptic maps: {what}") from None
    if len(categories) > MAX_SEGMENTS:
        raise UserError(f"{annotations} has {len(categories)} categories, over {MAX_SEGMENTS}")
    source = FileSource.of(
        files,
        description=f"{images.name} with panoptic maps {maps.name}",
        root=images,
        classes=(),
        extra=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        read=_read_pair,
    )
    return source, target


def by_id(content: Mapping[str, Any], key: str, path: Path) -> dict[Any, Mapping[str, Any]]:
    """Return the entries of a list in COCO's format by their ids.

    Raises UserError if two have the same, as in files joined from several: what refers to it
    would belong to the wrong one.
    """
    found: dict[Any, Mapping[str, Any]] = {}
    for each in content[key]:
        if each["id"] in found:
            raise UserError(f"{path}: `{key}` lists the id {each['id']} twice: give each its own")
        found[each["id"]] = each
    return found


def what_is_wrong(error: KeyError | TypeError | AttributeError) -> str:
    """Return what is wrong with a file in COCO's format that cannot be read, from the error."""
    if not isinstance(error, KeyError):
        return f"an entry has another form ({error})"
    [key] = error.args
    return f"it lacks {key!r}" if isinstance(key, str) else f"it lacks an entry with the id {key}"


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises UserError."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def _file(
    annotation: Mapping[str, Any],
    names: Mapping[int, str],
    classes: Mapping[int, int],
    images: Path,
    maps: Path,
) -> SourceFile:
    """Return the file of an annotation. Raises KeyError for an unknown category."""
    segments = [
        (each["id"], classes[each["category_id"]], int(each.get("iscrowd", 0)))
        for each in annotation["segments_info"]
    ]
    image = names.get(annotation["image_id"])
    if image is None:
        return SourceFile(annotation["file_name"], -1, 0, refused=_NO_IMAGE)
    num_bytes, fault = listed_size_and_fault(images, image)
    _, fault_of_map = listed_size_and_fault(maps, annotation["file_name"])
    return PanopticFile(
        image,
        -1,
        num_bytes,
        refused=_fault(segments) or fault or fault_of_map,
        map_path=str((maps / annotation["file_name"]).resolve()),
        segments=json.dumps(segments),
    )


def _fault(segments: Sequence[tuple[int, int, int]]) -> str:
    if len({number for number, _, _ in segments}) < len(segments):
        return _TWICE
    return _TOO_MANY if len(segments) > MAX_SEGMENTS else ""


def _read_pair(file: SourceFile, root: Path) -> bytes:
    """Return image, segments and map as one payload. Raises OSError."""
    assert isinstance(file, PanopticFile)
    described = join(file.segments.encode(), read_file(Path(file.map_path)))
    return join(file.read(root), described)


def read_panoptic(content: bytes) -> np.ndarray:
    """Decode a map with its segments to class + 256 · segment + 65536 · crowd, int64 `[h, w]`.

    Raises RefusedImageError if it is not a PNG, a pixel belongs to an unlisted segment, or a
    segment has no pixels.
    """
    listed, png = split(content)
    segments = json.loads(listed)
    try:
        ids = to_numbers(decode_png(png))
    except DamagedImageError:
        raise RefusedImageError(_UNREADABLE) from None
    present, places = np.unique(ids, return_inverse=True)
    known = {number for number, _, _ in segments}
    if not set(present.tolist()) <= known | {0}:
        raise RefusedImageError(_UNKNOWN)
    if not known <= set(present.tolist()):
        raise RefusedImageError(_EMPTY)
    numbers = {
        number: label + 256 * place + 65536 * crowd
        for place, (number, label, crowd) in enumerate(segments, start=1)
    }
    table = np.array([numbers.get(number, 0) for number in present.tolist()], np.int64)
    return table[places].reshape(ids.shape)


_NO_NUMBERS = "label map: no PNG of one number a pixel"
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

    Raises UserError if a list has a name twice, or there are too many.
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
    image = _opened_png(content, _NO_NUMBERS)
    values = np.asarray(image).astype(np.int64)
    if image.mode == "L":  # Pillow scales greys of fewer than 8 bits to 255
        values //= 255 // (2 ** content[BIT_DEPTH] - 1)
    if values.ndim != 2:
        raise RefusedImageError(_NO_NUMBERS)
    classes = values if void == 0 else np.where(values == void, 0, values + 1)
    if classes.max(initial=0) > num_classes:
        raise RefusedImageError(_BEYOND)
    return classes + 256 * classes


NYU_ROWS, NYU_COLUMNS = slice(54, 480), slice(41, 601)
"""NYU's evaluation crop: 426 × 560 pixels."""
_TARGET = {"kind": "depth"}
_INDICES = {"train": "trainNdxs", "test": "testNdxs"}
_NO_DEPTH_PNG = "depth: not a 16-bit PNG"
_IMPOSSIBLE = "depth: negative or not a number"
_TOO_FAR = f"depth: above {MAX_NUMBER // UNITS_A_METRE} m"


def add_depth_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps depth` to its parser."""
    parser.add_argument("images", type=Path, help="a folder of images")
    parser.add_argument(
        "depths", type=Path, help="a folder of 16-bit PNG files with the same names; 0: unknown"
    )
    parser.add_argument(
        "--units-per-metre", type=float, default=1000.0, help="unit of the PNG files; 1000: mm"
    )
    add_quality_argument(parser)
    add_job_arguments(parser, stores=True)


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
    add_job_arguments(parser, stores=True)


def run_depth(arguments: argparse.Namespace) -> int:
    """Write the shard folder from two folders. Raises UserError and OSError."""
    if not 0 < arguments.units_per_metre < math.inf:  # not a number is not either
        raise UserError("--units-per-metre must be a number above 0")
    pairs = pair_up(list_images(arguments.images), list_images(arguments.depths))
    read = functools.partial(_read_folders, units=arguments.units_per_metre)
    source = replace(pairs, read=read)
    return run_job(source, _encoder(arguments), arguments, label="depth")


def run_nyu(arguments: argparse.Namespace) -> int:
    """Write the shard folder of NYU Depth v2. Raises UserError and OSError."""
    source = list_nyu(
        arguments.labelled, arguments.splits, arguments.part, cuts=arguments.evaluation_crop
    )
    return run_job(source, _encoder(arguments), arguments, label="depth")


def _encoder(arguments: argparse.Namespace) -> TargetEncoder:
    read = functools.partial(png_of_map, read_map=read_depth)
    return TargetEncoder(arguments.quality, _TARGET, read)


def _read_folders(file: SourceFile, root: Path, *, units: float) -> bytes:
    """Return image and depth as one payload. Raises OSError and RefusedImageError."""
    assert isinstance(file, PairFile)
    depths = _opened_png(read_file(Path(file.target)), _NO_DEPTH_PNG)
    if not depths.mode.startswith("I"):
        raise RefusedImageError(_NO_DEPTH_PNG)
    return join(file.read(root), _as_bytes(np.asarray(depths) / units))


def _opened_png(content: bytes, reason: str) -> Image.Image:
    """Decode a PNG file. Raises RefusedImageError with a reason if that fails."""
    try:
        image = Image.open(io.BytesIO(content), formats=("PNG",))
        image.load()
    except MemoryError:  # says nothing about the file
        raise
    except Exception:  # Pillow raises almost any exception on damaged bytes
        raise RefusedImageError(reason) from None
    return image


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
    # HDF5 has MATLAB's dimensions in reverse order.
    image = np.asarray(_array(path, "images")[file.offset]).transpose(2, 1, 0)
    depth = np.asarray(_array(path, "depths")[file.offset]).T
    if file.cuts:
        image, depth = image[NYU_ROWS, NYU_COLUMNS], depth[NYU_ROWS, NYU_COLUMNS]
    return join(ppm(np.ascontiguousarray(image)), _as_bytes(depth))
