"""`maps instances`: write images and objects in COCO's format as shards of pairs.

A JSON file as "Microsoft COCO: Common Objects in Context" (Lin et al., 2014) publishes it lists
images, annotations and categories: a box, a class, a mask as polygons or run lengths, and whether
it is a crowd. In the shards, an object's mask is COCO's compressed run lengths of the whole image,
and classes are numbered from 1 in the order of the categories. Masks may overlap.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_tools.decode import RefusedImageError
from data_tools.image_shards import TargetEncoder, add_quality_argument
from data_tools.job_report import say
from data_tools.jobs import add_job_arguments, run_job
from data_tools.label_maps import by_id, read_json, what_is_wrong
from data_tools.sources import FileSource, SourceFile, listed_size_and_fault
from megavis.config.errors import UserError, counted
from megavis.data.codecs.instances import require_dense
from megavis.data.codecs.jpeg import join

_NO_OBJECT = "image without an object"
_NO_MASK = "object: a mask that is neither polygons nor run lengths of the image's size"
_LEAST_POLYGON = 6
"""Numbers of a triangle; shorter polygons have no area."""
_MOST_BEYOND = 10
"""Longer sides of the image that a point of a polygon may be away."""


def add_instances_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `maps instances` to its parser."""
    parser.add_argument("images", type=Path, help="folder of the images, such as train2017")
    parser.add_argument(
        "annotations", type=Path, help="JSON file, such as annotations/instances_train2017.json"
    )
    parser.add_argument(
        "--skip-empty",
        action="store_true",
        help="leave out images without an object other than crowds, as detectron2 does in training",
    )
    add_quality_argument(parser)
    add_job_arguments(parser, stores=True)


def run_instances(arguments: argparse.Namespace) -> int:
    """Write the shard folder. Raises UserError and OSError."""
    require_dense("maps instances")
    source, target = list_instances(
        arguments.images, arguments.annotations, skips_empty=arguments.skip_empty
    )
    encoder = TargetEncoder(arguments.quality, target, stored_objects)
    return run_job(source, encoder, arguments, label="instances")


@dataclass(frozen=True, slots=True)
class InstanceFile(SourceFile):
    """An image with its annotation as JSON."""

    annotation: str = "{}"


def list_instances(
    images: Path, annotations: Path, *, skips_empty: bool = False
) -> tuple[FileSource, dict[str, Any]]:
    """Return the images with their objects, and the manifest's description of the objects.

    Raises:
        UserError: the file has another form; names what is missing or wrong.
    """
    if not images.is_dir():
        raise UserError(f"{images} is not a folder")
    content = _checked(read_json(annotations), annotations)
    try:
        categories = by_id(content, "categories", annotations)
        classes = {key: number for number, key in enumerate(categories, 1)}
        names = tuple(each["name"] for each in categories.values())
        listed = by_id(content, "images", annotations)
        objects, dropped = _objects(content["annotations"], listed, classes, annotations)
        files = [
            _file(each, objects[number], images, skips_empty=skips_empty)
            for number, each in listed.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        what = what_is_wrong(error)
        raise UserError(f"{annotations} is not a JSON file of instances: {what}") from None
    without = f"{counted(dropped, 'box', 'boxes')} without area dropped"
    if dropped:
        say(f"{annotations}: {without}")
    source = FileSource.of(
        files,
        description=f"{images.name} with {annotations.name}" + (f", {without}" if dropped else ""),
        root=images,
        classes=(),
        extra=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        read=_read,
    )
    return source, {"kind": "instances", "class_names": names, "things": (True,) * len(names)}


def _checked(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the content of a file that lists images, annotations and categories."""
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object, as instances_train2017.json does")
    for key in ("images", "annotations", "categories"):
        if not content.get(key):
            raise UserError(
                f"{path} has no `{key}`, which a file of instances, such as"
                " instances_train2017.json, has"
            )
    if "segments_info" in content["annotations"][0]:
        raise UserError(f"{path} has panoptic maps: use `data_tools maps panoptic`")
    return content


Object = dict[str, Any]


def _objects(
    annotations: Sequence[Mapping[str, Any]],
    images: Mapping[int, Any],
    classes: Mapping[int, int],
    path: Path,
) -> tuple[dict[int, list[Object]], int]:
    """Return the objects of each image, and the number of dropped boxes without area."""
    found: dict[int, list[Object]] = {number: [] for number in images}
    num_dropped = 0
    for each in annotations:
        what = f"{path}: annotation {each.get('id')}"
        if each["image_id"] not in found:
            raise UserError(f"{what} is of image {each['image_id']}, which `images` does not list")
        if each["category_id"] not in classes:
            raise UserError(
                f"{what} has category {each['category_id']}, which `categories` does not list"
            )
        if "segmentation" not in each:
            raise UserError(f"{what} has no `segmentation`: objects need masks")
        mask = each["segmentation"]
        if isinstance(mask, list):
            mask = [polygon for polygon in mask if len(polygon) >= _LEAST_POLYGON]
        _check_numbers(each, what)
        if not mask or min(each["bbox"][2:]) <= 0:
            num_dropped += 1
            continue
        found[each["image_id"]].append(
            {
                "class": classes[each["category_id"]],
                "box": [float(number) for number in each["bbox"]],
                "area": float(each["area"]),
                "crowd": int(each.get("iscrowd", 0)),
                "mask": mask,
            }
        )
    return found, num_dropped


def _check_numbers(annotation: Mapping[str, Any], what: str) -> None:
    """Raise UserError if box or area are no numbers, which JSON files of Python may hold."""
    box, area = annotation["bbox"], annotation["area"]
    if len(box) != 4 or not all(map(math.isfinite, box)):
        raise UserError(f"{what} has no `bbox` of four numbers, but {box}")
    if not math.isfinite(area):
        raise UserError(f"{what} has an `area` of {area}")


def _file(
    image: Mapping[str, Any], objects: Sequence[Object], folder: Path, *, skips_empty: bool
) -> InstanceFile:
    name, size = image["file_name"], [int(image["height"]), int(image["width"])]
    num_bytes, fault = listed_size_and_fault(folder, name)
    described = json.dumps({"size": size, "objects": objects})
    is_empty = all(each["crowd"] for each in objects)
    refused = _NO_OBJECT if skips_empty and is_empty else fault
    return InstanceFile(name, -1, num_bytes, refused=refused, annotation=described)


def _read(file: SourceFile, root: Path) -> bytes:
    """Return image and annotation as one payload. Raises OSError."""
    assert isinstance(file, InstanceFile)
    return join(file.read(root), file.annotation.encode())


def stored_objects(content: bytes) -> tuple[tuple[int, int], bytes]:
    """Return the size of an image, and its annotation with every mask as compressed run lengths.

    Raises RefusedImageError for a mask of another form.
    """
    annotation = json.loads(content)
    height, width = annotation["size"]
    for each in annotation["objects"]:
        each["mask"] = _run_lengths(each["mask"], height, width)
    return (height, width), json.dumps(annotation, separators=(",", ":")).encode()


def _run_lengths(mask: Any, height: int, width: int) -> str:
    from pycocotools import mask as coco

    try:
        if not _may_be_mask(mask, height, width):
            raise RefusedImageError(_NO_MASK)
        if isinstance(mask, list):
            encoded = coco.merge(coco.frPyObjects(mask, height, width))
        elif isinstance(mask["counts"], list):
            encoded = coco.frPyObjects(mask, height, width)
        else:
            encoded = {"size": mask["size"], "counts": mask["counts"].encode()}
        if list(encoded["size"]) != [height, width] or coco.decode(encoded).shape != (
            height,
            width,
        ):
            raise RefusedImageError(_NO_MASK)
        text: str = encoded["counts"].decode()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RefusedImageError(_NO_MASK) from None
    return text


def _may_be_mask(mask: Any, height: int, width: int) -> bool:
    """Return whether numbers of a mask are possible, which COCO's own tools do not check.

    They take memory for every pixel on the outline of a polygon, also beyond the image.
    """
    if isinstance(mask, list):
        most = _MOST_BEYOND * max(height, width)
        numbers = [number for polygon in mask for number in polygon]
        return all(isinstance(each, int | float) and abs(each) <= most for each in numbers)
    counts = mask["counts"]
    if not isinstance(counts, list):
        return True
    return min(counts, default=0) >= 0 and sum(counts) == height * width
