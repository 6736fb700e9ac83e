"""`maps panoptic`: write images and panoptic maps in COCO's format as shards of pairs.

A JSON file lists images, annotations and categories; the map of an image is a PNG whose pixels
encode the id of a segment as R + 256 G + 65536 B, with 0 for unlabelled pixels. Classes are
numbered from 1 in the order of the categories, segments from 1 in the order of the annotation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.decode import RefusedImageError
from data_tools.jobs import add_job_arguments, run_job
from data_tools.jpeg_shards import add_quality_argument, check_quality
from data_tools.pair_shards import LabelMapEncoder
from data_tools.sources import FileSource, SourceFile
from megavis.config.errors import UserError
from megavis.data.codecs.jpeg import DamagedImageError, decode_png, join, split
from megavis.data.codecs.label_maps import MAX_SEGMENTS, to_numbers

_NO_IMAGE = "map without an image in the JSON file"
_NO_MAP = "image without an annotation"
_UNREADABLE = "label map: damaged, or no PNG"
_UNKNOWN = "label map: id that its annotation does not list"
_EMPTY = "label map: listed segment without a pixel"
_TOO_MANY = f"label map: more than {MAX_SEGMENTS} segments"
_TWICE = "label map: id listed twice"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps panoptic` to its parser."""
    parser.add_argument("images", type=Path, help="folder of the images, such as train2017")
    parser.add_argument("maps", type=Path, help="folder of their maps, such as panoptic_train2017")
    parser.add_argument("annotations", type=Path, help="JSON file, such as panoptic_train2017.json")
    add_quality_argument(parser)
    add_job_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    check_quality(arguments.quality)
    source, target = list_panoptic(arguments.images, arguments.maps, arguments.annotations)
    encoder = LabelMapEncoder(arguments.quality, target, read_panoptic)
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
    content = _read_json(annotations)
    try:
        categories = content["categories"]
        classes = {each["id"]: number for number, each in enumerate(categories, start=1)}
        target = {
            "kind": "panoptic",
            "class_names": tuple(each["name"] for each in categories),
            "things": tuple(bool(each["isthing"]) for each in categories),
        }
        names = {each["id"]: each["file_name"] for each in content["images"]}
        files = [_file(each, names, classes, images, maps) for each in content["annotations"]]
        described = {each["image_id"] for each in content["annotations"]}
        files += [
            SourceFile(name, -1, 0, refused=_NO_MAP)
            for number, name in names.items()
            if number not in described
        ]
    except (KeyError, TypeError) as error:
        raise UserError(f"{annotations} is not a JSON file of panoptic maps: {error!r}") from None
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


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
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
    path = images / image
    return PanopticFile(
        image,
        -1,
        path.stat().st_size if path.is_file() else -1,
        refused=_fault(segments),
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
    described = join(file.segments.encode(), Path(file.map_path).read_bytes())
    return join(file.read(root), described)


def read_panoptic(content: bytes) -> np.ndarray:
    """Decode a map with its segments to class + 256 · segment + 65536 · crowd, int64 `[h, w]`.

    Raises RefusedImageError for other than a PNG, a pixel of an unlisted segment, or a segment
    without pixels.
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
