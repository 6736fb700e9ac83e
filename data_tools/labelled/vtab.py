"""Data sets prepared as in VTAB: CLEVR, KITTI, DMLab and Diabetic Retinopathy.

Counts and distances in scenes of CLEVR and KITTI are mapped to classes as in "A Large-scale Study
of Representation Learning with the Visual Task Adaptation Benchmark" and its code.

DMLab is JPEG images in TFRecord files. A record is its length (uint64), a CRC of four bytes, its
content, and another CRC. The content is a `tf.train.Example` in the wire format of protocol
buffers: a map from names to lists of bytes, floats or integers. Images stay in place and are read
by offset.

Retinopathy (Kaggle, 2015) is prepared like the winner's entry: "Images are resized so that the
radius of an eyeball is 300 pixels, then they are cropped to 90% of the radius" (the description of
TensorFlow Datasets' `btgraham-300`, which VTAB uses), and the local average is subtracted. Here
Pillow resizes, with antialiasing.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_tools.decode import decode_image
from data_tools.labelled.data_set import (
    TEST,
    TRAIN,
    VALIDATION,
    Listing,
    image_file,
    ppm,
)
from data_tools.sources import SourceFile
from data_tools.user_text import read_columns, read_lines, read_table, read_text
from megavis.config.errors import UserError
from megavis.data.format.folders import find_files

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
    text = read_text(root / listed_in)
    try:
        scenes = json.loads(text)["scenes"]
        labels = {scene["image_filename"]: label(scene["objects"]) for scene in scenes}
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


_LENGTH = struct.Struct("<Q")
_CHECK_BYTES = 4
_VARINT, _DELIMITED = 0, 2
# Field numbers of Example, Features, the map's entries, and Feature.
_FEATURES, _ENTRY, _KEY, _VALUE, _BYTES_LIST, _INT64_LIST = 1, 1, 1, 2, 1, 3
_NUM_CLASSES = 6


def list_dmlab(root: Path, split: str) -> Listing:
    """List DMLab's frames.

    Classes have numbers and no names: {close, far, very far} × {positive, negative reward}.
    """
    paths = find_files(root, f"dmlab-{split}.tfrecord*")
    if not paths:
        raise UserError(f"{root} has no dmlab-{split}.tfrecord: give the unpacked folder of DMLab")
    files = [file for path in paths for file in _read_records(path)]
    return Listing([str(number) for number in range(_NUM_CLASSES)], files)


def _read_records(path: Path) -> Iterator[SourceFile]:
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for number, (start, end) in enumerate(_records(data)):
                features = dict(_features(data, start, end))
                first, last = features["image"]
                label, _ = _varint(data, features["label"][0])
                name = f"{path.name}/{number:06d}.jpg"
                yield SourceFile(name, label, last - first, path.name, first)
        except (KeyError, IndexError, ValueError, struct.error):
            raise UserError(f"{path} is truncated or has no records of DMLab") from None


def _records(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield start and end of each record. Raises ValueError if the file is truncated."""
    place = 0
    while place < len(data):
        start = place + _LENGTH.size + _CHECK_BYTES
        end = start + _LENGTH.unpack_from(data, place)[0]
        place = end + _CHECK_BYTES
        if place > len(data):
            raise ValueError("cut")
        yield start, end


def _features(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and position of the first value of each feature of an Example."""
    for number, *features in _fields(data, start, end):
        if number != _FEATURES:
            continue
        for _, *entry in _fields(data, *features):
            parts = {number: (first, last) for number, first, last in _fields(data, *entry)}
            first, last = parts[_KEY]
            for kind, *values in _fields(data, *parts[_VALUE]):
                # Bytes are fields of the list; integers may be packed into a single field.
                _, *value = next(_fields(data, *values))
                if kind in (_BYTES_LIST, _INT64_LIST):
                    yield data[first:last].decode(), (value[0], value[1])


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each field of a message."""
    while start < end:
        tag, start = _varint(data, start)
        if tag & 7 == _DELIMITED:
            length, start = _varint(data, start)
            last = start + length
        elif tag & 7 == _VARINT:
            _, last = _varint(data, start)
        else:
            raise ValueError("a field of another type")
        if last > end:
            raise ValueError("a field that ends after its message")
        yield tag >> 3, start, last
        start = last


def _varint(data: mmap.mmap, place: int) -> tuple[int, int]:
    """Decode a varint; return its value and its end."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


_RADIUS = 300
_KEPT = 0.9
_GREY = 128
_CONTRAST = 4
# File of labels, selection of its rows, and folder of the images.
_SPLITS = {
    TRAIN: ("trainLabels.csv", None, "train"),
    VALIDATION: ("retinopathy_solution.csv", "Public", "test"),
    TEST: ("retinopathy_solution.csv", "Private", "test"),
}
_CLASSES = ["no retinopathy", "mild", "moderate", "severe", "proliferative"]


def is_retinopathy(root: Path) -> bool:
    """Return whether these are the competition's files; CIFAR-10 on Kaggle has similar names."""
    path = root / _SPLITS[TRAIN][0]
    if not path.is_file():
        return True  # recognized by the other file's name
    header = read_text(path).partition("\n")[0].replace('"', "").split(",")
    return {"image", "level"} <= {name.strip() for name in header}


def list_retinopathy(root: Path, split: str) -> Listing:
    """List the competition's training set, and its test set by public or private leaderboard."""
    listed_in, usage, folder = _SPLITS[split]
    columns = ("image", "level") if usage is None else ("image", "level", "Usage")
    labels = {}
    for number, row in read_table(root / listed_in, columns):
        if not row["level"].isdecimal():
            level = row["level"]
            raise UserError(
                f"{root / listed_in} line {number}: the level {level!r} is not a number"
            )
        if usage is None or row["Usage"] == usage:
            labels[row["image"]] = int(row["level"])
    files = [
        image_file(root, f"{folder}/{name}.jpeg", label, listed_in=listed_in)
        for name, label in labels.items()
    ]
    return Listing(_CLASSES, files, _read_eye)


def _read_eye(file: SourceFile, root: Path) -> bytes:
    return ppm(prepare_eye(decode_image(file.read(root)), radius=_RADIUS))


def prepare_eye(pixels: np.ndarray, *, radius: int) -> np.ndarray:
    """Scale uint8 `[h, w, 3]` to an eyeball radius in pixels, subtract the local average, and crop.

    Returns uint8 `[h', w', 3]`, sides of at most 1.8 radii, grey outside 90 % of the radius.
    """
    from scipy.ndimage import gaussian_filter

    height, width, _ = pixels.shape
    factor = radius / (_radius_of(pixels) or height / 2)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    scaled = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR), float)
    blurred = gaussian_filter(scaled, (radius / 30, radius / 30, 0), mode="mirror")
    shown = np.clip(_CONTRAST * (scaled - blurred) + _GREY, 0, 255)
    reach = int(_KEPT * radius)
    rows, columns = (np.arange(side) - side // 2 for side in shown.shape[:2])
    disc = rows[:, None] ** 2 + columns**2 <= reach**2
    shown = np.where(disc[..., None], shown, _GREY)
    kept = shown[np.abs(rows + 0.5) < reach][:, np.abs(columns + 0.5) < reach]
    return kept.round().astype(np.uint8)


def _radius_of(pixels: np.ndarray) -> float:
    """Return half the number of pixels in the middle row that are not nearly black."""
    row = pixels[len(pixels) // 2].sum(axis=1, dtype=float)
    radius = (row > row.mean() / 10).sum() / 2
    return float(radius) if radius >= 1 else 0.0
