"""Images and annotations as COCO 2017 publishes them, small and made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CATEGORIES = [
    {"supercategory": "person", "id": 1, "name": "person"},
    {"supercategory": "vehicle", "id": 3, "name": "car"},
    {"supercategory": "kitchen", "id": 90, "name": "cup"},
]
_COLORS = {1: (220, 40, 40), 3: (40, 200, 60), 90: (50, 60, 230)}
_SIZES = ((48, 64), (64, 48), (56, 56))


def write_coco(folder: Path, *, train: int = 8, validation: int = 4) -> Path:
    """Write `train2017`, `val2017` and `annotations`; return the folder.

    Every image has two overlapping objects, a triangle and a rectangle, the first one also a crowd
    in run lengths, the second none.
    """
    (folder / "annotations").mkdir(parents=True)
    for part, count, seed in (("train2017", train, 0), ("val2017", validation, 1)):
        (folder / part).mkdir()
        content = _part(folder / part, count, np.random.default_rng(seed))
        path = folder / "annotations" / f"instances_{part}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def _part(folder: Path, count: int, random: np.random.Generator) -> dict[str, Any]:
    images, annotations = [], []
    for number in range(count):
        height, width = _SIZES[number % len(_SIZES)]
        pixels = random.integers(90, 160, (height, width, 3)).astype(np.uint8)
        key, name = 1000 + 7 * number, f"{1000 + 7 * number:012d}.jpg"
        images.append(
            {"license": 1, "file_name": name, "height": height, "width": width, "id": key}
        )
        for place in range(0 if number == 1 else 2):
            annotations.append(_object(random, pixels, is_triangle=place == 0))
        if number == 0:
            annotations.append(_crowd(height, width))
        for each in annotations:
            each.setdefault("image_id", key)
        Image.fromarray(pixels).save(folder / name, quality=95)
    for place, each in enumerate(annotations):
        each["id"] = 500 + place
    return {
        "info": {"year": 2017},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": CATEGORIES,
    }


def _object(
    random: np.random.Generator, pixels: np.ndarray, *, is_triangle: bool
) -> dict[str, Any]:
    """Paint an object near the centre, and return its annotation."""
    height, width = pixels.shape[:2]
    half = random.integers(10, 18, 2)
    y, x = height // 2 + random.integers(-5, 6), width // 2 + random.integers(-5, 6)
    top, left = max(0, y - half[0]), max(0, x - half[1])
    bottom, right = min(height, y + half[0]), min(width, x + half[1])
    category = int(random.choice([1, 3, 90]))
    rows, columns = np.indices((height, width)) + 0.5
    inside = (rows > top) & (rows < bottom) & (columns > left) & (columns < right)
    polygon = [left, top, right, top, right, bottom, left, bottom]
    if is_triangle:
        # Left and below the diagonal.
        inside &= (rows - top) * (right - left) > (columns - left) * (bottom - top)
        polygon = [left, top, right, bottom, left, bottom]
    pixels[inside] = _COLORS[category]
    return {
        "category_id": category,
        "iscrowd": 0,
        "segmentation": [[float(value) for value in polygon]],
        "bbox": [float(value) for value in (left, top, right - left, bottom - top)],
        "area": float(inside.sum()),
    }


def _crowd(height: int, width: int) -> dict[str, Any]:
    """Return a crowd in the first eight columns, as uncompressed run lengths."""
    counts = [0, 8 * height, (width - 8) * height]
    return {
        "category_id": 1,
        "iscrowd": 1,
        "segmentation": {"counts": counts, "size": [height, width]},
        "bbox": [0.0, 0.0, 8.0, float(height)],
        "area": 8.0 * height,
    }


def write_coco_shards(folder: Path, **counts: int) -> Path:
    """Write shards `train` and `validation` of such images; return the folder of these."""
    from data_tools.__main__ import main

    coco = write_coco(folder / "coco", **counts)
    for part, shards in (("train2017", "train"), ("val2017", "validation")):
        listed = str(coco / "annotations" / f"instances_{part}.json")
        words = ["maps", "instances", str(coco / part), listed, "--out", str(folder / shards)]
        assert main(words) == 0
    return folder
