"""Diabetic retinopathy (Kaggle, 2015), prepared like the winner's entry and VTAB.

"Images are resized so that the radius of an eyeball is 300 pixels, then they are cropped to 90% of
the radius" (the description of TensorFlow Datasets' `btgraham-300`, which VTAB uses), and the local
average is subtracted. Here Pillow resizes, with antialiasing.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from data_tools.decode import decode_image
from data_tools.labelled.data_set import TEST, TRAIN, VALIDATION, Listing, image_file, ppm
from data_tools.sources import SourceFile
from megavis.config.errors import UserError

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


def list_retinopathy(root: Path, split: str) -> Listing:
    """List the competition's training set, and its test set by public or private leaderboard."""
    listed_in, usage, folder = _SPLITS[split]
    try:
        with (root / listed_in).open(newline="", encoding="utf-8") as rows:
            labels = {
                row["image"]: int(row["level"])
                for row in csv.DictReader(rows)
                if usage is None or row["Usage"] == usage
            }
    except OSError as error:
        raise UserError(f"{root / listed_in} cannot be read: {error.strerror}") from None
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{root / listed_in} has no columns image, level and Usage") from None
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
