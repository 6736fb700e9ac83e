"""`scenes`: images of objects on a floor, with exact panoptic maps and depths.

Balls, boxes and cones stand in front of a wall. The camera looks along the floor, so an object's
position determines its depth, and its depth determines its size; nearer objects hide farther ones.
Textures differ between objects and are independent of the class, except with `--class-colors`.

Maps are written in the format of COCO Panoptic, objects as COCO instances, and depths as 16-bit PNG
in millimetres.

Legend: s side of an image in pixels, n its segments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.job_report import ProgressBar, say
from data_tools.made_folder import make_folder
from megavis.config.arguments import non_negative, positive
from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import to_pixels

RECORD_NAME = "scenes.json"
CATEGORIES = (
    {"id": 1, "name": "ball", "supercategory": "object", "isthing": 1},
    {"id": 2, "name": "box", "supercategory": "object", "isthing": 1},
    {"id": 5, "name": "cone", "supercategory": "object", "isthing": 1},
    {"id": 100, "name": "wall", "supercategory": "ground", "isthing": 0},
    {"id": 101, "name": "floor", "supercategory": "ground", "isthing": 0},
)
_CATEGORIES = {
    "panoptic": CATEGORIES,
    "instances": tuple(
        {name: each[name] for name in ("id", "name", "supercategory")}
        for each in CATEGORIES
        if each["isthing"]
    ),
}
_STREAMS = {"train": 0, "validation": 1}
_SHAPES, _WALL, _FLOOR = (1, 2, 5), 100, 101
_HORIZON, _CAMERA = 0.35, 1.3
"""Row of the horizon as a fraction of the side, and height of the camera above the floor in metres
times its focal length in image sides."""
_NEAR, _WALLS, _SIZES = 2.2, (5.0, 9.0), (0.9, 1.7)
"""In metres: distance of the nearest object, range of the wall's distance, and range of the
objects' heights times the focal length."""
_COLORS = {
    1: (0.80, 0.25, 0.20),
    2: (0.20, 0.65, 0.25),
    5: (0.25, 0.30, 0.80),
    _WALL: (0.75, 0.72, 0.68),
    _FLOOR: (0.42, 0.36, 0.32),
}
"""Mean color of each class with `--class-colors`."""
_LEAST_SIDE, _MILLIMETRES, _MANY_IDS = 16, 1000, 1 << 24
_FAR = 65.0
"""Largest distance in metres: 16 bits hold 65.5 m in millimetres."""


@dataclass(frozen=True)
class Scene:
    """An image with its annotations.

    Attributes:
        image: uint8 `[s, s, 3]`.
        segments: int64 `[s, s]`, indices into `categories`.
        categories: ids in `CATEGORIES`, one per segment.
        depth: uint16 `[s, s]`, millimetres.
    """

    image: np.ndarray
    segments: np.ndarray
    categories: tuple[int, ...]
    depth: np.ndarray


def add_scenes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scenes` to its parser."""
    parser.add_argument(
        "out",
        type=Path,
        help="the folder to write: images/, panoptic/ and depth/ with train/ and validation/ in"
        " each, and panoptic_train.json, instances_train.json, and both of validation",
    )
    parser.add_argument("--size", type=positive, default=64, help="side of an image in pixels")
    parser.add_argument("--images", type=positive, default=4000, help="training images")
    parser.add_argument("--validation-images", type=positive, default=200, help="held-out images")
    parser.add_argument("--objects", type=positive, default=4, help="most objects per scene")
    parser.add_argument(
        "--wall",
        type=float,
        nargs=2,
        default=_WALLS,
        metavar=("NEAREST", "FARTHEST"),
        help="range of the wall's distance in metres; objects stand in front of it",
    )
    parser.add_argument(
        "--class-colors",
        action="store_true",
        help="give each class its own colors; otherwise textures are independent of the class",
    )
    parser.add_argument("--seed", type=non_negative, default=0, help="seed of all draws")


def run_scenes(arguments: argparse.Namespace) -> int:
    """Write the folder. Raises UserError and OSError."""
    if arguments.size < _LEAST_SIDE:
        raise UserError(f"--size must be at least {_LEAST_SIDE}")
    if not _NEAR < arguments.wall[0] < arguments.wall[1] <= _FAR:
        raise UserError(
            f"--wall must be two increasing distances above {_NEAR} m and up to {_FAR:g} m"
        )
    options = ("size", "images", "validation_images", "objects", "wall", "class_colors", "seed")
    record = {name: getattr(arguments, name) for name in options}
    record["wall"] = list(arguments.wall)  # as it is read back from JSON
    record["annotations"] = list(_CATEGORIES)  # earlier versions wrote panoptic ones only

    def write(folder: Path) -> None:
        counts = {"train": arguments.images, "validation": arguments.validation_images}
        with ProgressBar("scenes", total=sum(counts.values())) as bar:
            for part, count in counts.items():
                _write_part(folder, part, count, record, bar)

    made = make_folder(arguments.out, RECORD_NAME, record, write)
    verb = "wrote" if made else "found"
    count = arguments.images + arguments.validation_images
    say(f"{arguments.out}: {verb} {count} scenes of {arguments.size}x{arguments.size} pixels")
    return 0


def _write_part(
    folder: Path, part: str, count: int, record: Mapping[str, Any], bar: ProgressBar
) -> None:
    for kind in ("images", "panoptic", "depth"):
        (folder / kind / part).mkdir(parents=True)
    images, annotations, objects = [], [], list[dict[str, Any]]()
    for number in range(count):
        random = np.random.default_rng([record["seed"], _STREAMS[part], number])
        scene = draw_scene(
            random,
            size=record["size"],
            most_objects=record["objects"],
            walls=(record["wall"][0], record["wall"][1]),
            class_colors=record["class_colors"],
        )
        name, side = f"{number:06d}.png", record["size"]
        Image.fromarray(scene.image).save(folder / "images" / part / name)
        Image.fromarray(scene.depth).save(folder / "depth" / part / name)
        ids = random.choice(_MANY_IDS - 1, len(scene.categories), replace=False) + 1
        pixels = to_pixels(ids[scene.segments])
        Image.fromarray(pixels).save(folder / "panoptic" / part / name)
        images.append({"id": number, "file_name": name, "width": side, "height": side})
        segments = segments_info(scene, ids)
        annotations.append({"image_id": number, "file_name": name, "segments_info": segments})
        objects += objects_info(scene, image_id=number, first_id=len(objects) + 1)
        bar.advance()
    for kind, own in (("panoptic", annotations), ("instances", objects)):
        content = {"images": images, "annotations": own, "categories": _CATEGORIES[kind]}
        (folder / f"{kind}_{part}.json").write_text(json.dumps(content), encoding="utf-8")


def segments_info(scene: Scene, ids: np.ndarray) -> list[dict[str, Any]]:
    """Return COCO's JSON records of the visible segments, with `ids` `[n]`."""
    found = []
    for place, category in enumerate(scene.categories):
        rows, columns = np.nonzero(scene.segments == place)
        if not len(rows):
            continue
        top, left = int(rows.min()), int(columns.min())
        sides = [int(columns.max()) - left + 1, int(rows.max()) - top + 1]
        found.append(
            {
                "id": int(ids[place]),
                "category_id": category,
                "iscrowd": 0,
                "bbox": [left, top, *sides],
                "area": len(rows),
            }
        )
    return found


def objects_info(scene: Scene, *, image_id: int, first_id: int) -> list[dict[str, Any]]:
    """Return COCO's JSON records of the visible objects, with their visible pixels as masks.

    Ids count from `first_id`. Masks are uncompressed run lengths.
    """
    found: list[dict[str, Any]] = []
    for each in segments_info(scene, np.arange(len(scene.categories))):
        if each["category_id"] in _SHAPES:
            mask = scene.segments == each["id"]
            lengths = {"size": list(mask.shape), "counts": _run_lengths(mask)}
            own = {"id": first_id + len(found), "image_id": image_id, "segmentation": lengths}
            found.append({**each, **own})
    return found


def _run_lengths(mask: np.ndarray) -> list[int]:
    """Return the run lengths of bool `[s, s]` down its columns, starting with false."""
    pixels = np.concatenate(([False], mask.ravel(order="F")))
    starts = np.flatnonzero(pixels[1:] != pixels[:-1])
    lengths: list[int] = np.diff(starts, prepend=0, append=mask.size).tolist()
    return lengths


def draw_scene(
    random: np.random.Generator,
    *,
    size: int,
    most_objects: int,
    walls: tuple[float, float] = _WALLS,
    class_colors: bool = False,
) -> Scene:
    """Draw a scene of one to `most_objects` objects in front of a wall at a distance in metres.

    With `class_colors`, a texture's colors are close to its class's colors.
    """
    rows, columns = (np.indices((size, size)) + 0.5) / size

    def texture(category: int) -> np.ndarray:
        color = _COLORS[category] if class_colors else None
        return _texture(random, rows, columns, color)

    wall = random.uniform(*walls)
    floor = _CAMERA / np.maximum(rows - _HORIZON, 1e-6)
    is_floor = floor < wall
    depth = np.where(is_floor, floor, wall)
    segments = is_floor.astype(np.int64)
    categories = [_WALL, _FLOOR]
    textures = [texture(category) for category in categories]
    image = np.where(is_floor[..., None], textures[1], textures[0])
    distances = random.uniform(_NEAR, 0.95 * wall, random.integers(1, most_objects + 1))
    for distance in sorted(distances.tolist(), reverse=True):
        category = int(random.choice(_SHAPES))
        inside = _shape(random, category, distance, rows, columns)
        segments[inside] = len(categories)
        depth[inside] = distance
        image[inside] = texture(category)[inside]
        categories.append(category)
    millimetres = np.clip((depth * _MILLIMETRES).round(), 1, 65535).astype(np.uint16)
    pixels = (255.0 * image.clip(0.0, 1.0)).round().astype(np.uint8)
    return Scene(pixels, segments, tuple(categories), millimetres)


def _shape(
    random: np.random.Generator,
    category: int,
    distance: float,
    rows: np.ndarray,
    columns: np.ndarray,
) -> np.ndarray:
    """Return the mask bool `[s, s]` of an object at a distance in metres."""
    bottom = _HORIZON + _CAMERA / distance
    height = random.uniform(*_SIZES) / distance
    centre = random.uniform(0.1, 0.9)
    across, up = columns - centre, bottom - rows
    if category == 1:
        return across**2 + (up - height / 2) ** 2 < (height / 2) ** 2
    half = height * random.uniform(0.3, 0.6)
    if category == 2:
        return (np.abs(across) < half) & (up > 0) & (up < height)
    return (up > 0) & (np.abs(across) < half * (1.0 - up / height))


def _texture(
    random: np.random.Generator,
    rows: np.ndarray,
    columns: np.ndarray,
    color: tuple[float, float, float] | None,
) -> np.ndarray:
    """Return a texture float64 `[s, s, 3]` in about [0, 1]: two colors in waves, and noise.

    The first color is near `color` if that is given.
    """
    base = random.uniform(0.15, 0.85, 3) if color is None else color + random.uniform(-0.1, 0.1, 3)
    other = base + random.uniform(-0.2, 0.2, 3)
    frequency, angle, phase = (
        random.uniform(2.0, 14.0),
        random.uniform(0, np.pi),
        random.uniform(0, 6),
    )
    along = np.cos(angle) * columns + np.sin(angle) * rows
    share = (0.5 + 0.5 * np.sin(2 * np.pi * frequency * along + phase))[..., None]
    return base + (other - base) * share + random.normal(0.0, 0.02, (*rows.shape, 1))
