"""Images of scenes, labelled by their content as in VTAB: CLEVR and KITTI.

Counts and distances are mapped to classes as in "A Large-scale Study of Representation Learning
with the Visual Task Adaptation Benchmark" and its code.
"""

from __future__ import annotations

import functools
import itertools
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.labelled.data_set import (
    TEST,
    TRAIN,
    VALIDATION,
    Listing,
    image_file,
    read_columns,
    read_lines,
)
from megavis.config.errors import UserError

_CLEVR_FOLDERS = {TRAIN: "train", TEST: "val"}
_CLEVR_COUNTS = range(3, 11)
_CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)

_KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE = 1000.0
_VEHICLES = ("Car", "Van", "Truck")
_KITTI_SEED = 123
_KITTI_SHARE = 10  # per cent of the videos for validation, and for testing


def list_clevr_count(root: Path, split: str) -> Listing:
    """List CLEVR by the number of objects, 3 to 10."""
    names = [f"{count} objects" for count in _CLEVR_COUNTS]
    return _list_clevr(root, split, names, lambda scene: len(scene) - _CLEVR_COUNTS[0])


def list_clevr_distance(root: Path, split: str) -> Listing:
    """List CLEVR by the distance of the nearest object, the third of `pixel_coords`."""

    def label(scene: Sequence[Mapping[str, Any]]) -> int:
        nearest = min(item["pixel_coords"][2] for item in scene)
        return bisect_left(_CLEVR_DISTANCES, nearest) - 1

    return _list_clevr(root, split, _ranges(_CLEVR_DISTANCES), label)


def _list_clevr(
    root: Path, split: str, names: Sequence[str], label: Callable[[Sequence[Any]], int]
) -> Listing:
    """List CLEVR, with `val` as test set, since the released test images have no scenes."""
    folder = _CLEVR_FOLDERS[split]
    listed_in = f"scenes/CLEVR_{folder}_scenes.json"
    try:
        scenes = json.loads((root / listed_in).read_text(encoding="utf-8"))["scenes"]
        labels = {scene["image_filename"]: label(scene["objects"]) for scene in scenes}
    except OSError as error:
        raise UserError(f"{root / listed_in} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"{root / listed_in} has no scenes of CLEVR") from None
    files = [
        image_file(root, f"images/{folder}/{name}", number, listed_in=listed_in)
        for name, number in labels.items()
    ]
    return Listing(names, files)


def list_kitti(root: Path, split: str) -> Listing:
    """List KITTI's object detection set by the distance of the nearest car, van or truck.

    Only its training images have labels. The development kit assigns them to videos; a tenth of
    the videos each is for validation and testing, drawn as in VTAB.
    """
    files = []
    for number in sorted(_kitti_splits(root)[split]):
        listed_in = f"training/label_2/{number:06d}.txt"
        label = bisect_left(_KITTI_DISTANCES, _nearest_vehicle(root / listed_in)) - 1
        path = f"training/image_2/{number:06d}.png"
        files.append(image_file(root, path, label, listed_in=listed_in))
    return Listing([*_ranges(_KITTI_DISTANCES), "no vehicle"], files)


def _nearest_vehicle(path: Path) -> float:
    """Return the smallest z of a vehicle in metres, 1000 without one."""
    rows = read_columns(path, 15)
    try:
        return min((float(row[13]) for row in rows if row[0] in _VEHICLES), default=_NO_VEHICLE)
    except ValueError:
        raise UserError(f"{path} has no labels of KITTI's objects") from None


@functools.lru_cache(maxsize=1)
def _kitti_splits(root: Path) -> dict[str, list[int]]:
    videos = defaultdict(list)
    lines = read_columns(root / "mapping/train_mapping.txt", 3)
    places = ",".join(read_lines(root / "mapping/train_rand.txt")).split(",")
    try:
        for number, place in enumerate(filter(None, map(str.strip, places))):
            videos[lines[int(place) - 1][1]].append(number)
    except (ValueError, IndexError):
        raise UserError(
            f"{root / 'mapping/train_rand.txt'} does not number the {len(lines)} lines of"
            " train_mapping.txt"
        ) from None
    # The legacy generator gives the same draws in all versions of numpy.
    draws = np.random.RandomState(_KITTI_SEED)
    count = max(1, _KITTI_SHARE * len(videos) // 100)
    held: dict[str, set[str]] = {}
    for split in (TEST, VALIDATION):
        left = sorted(set(videos).difference(*held.values()))
        if len(left) < count:
            raise UserError(f"{root / 'mapping/train_mapping.txt'}: too few videos to split")
        held[split] = set(draws.choice(left, count, replace=False).tolist())
    held[TRAIN] = set(videos).difference(*held.values())
    return {split: [n for name in names for n in videos[name]] for split, names in held.items()}


def _ranges(limits: Sequence[float]) -> list[str]:
    return [f"{low:g} to {high:g}" for low, high in itertools.pairwise(limits)]
