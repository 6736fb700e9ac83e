"""Codec of images with objects: boxes, classes and masks that may overlap.

A `.pair` payload holds the image's JPEG file and JSON: the image's `size` (height, width) and
`objects`, each with `class` from 1, `box` (left, top, width, height), `area`, `crowd` and `mask`,
COCO's compressed run lengths. Image and masks get the same resize, crop and flip; boxes are made of
the masks afterwards, as ViTDet's recipe does.

Legend: h and w, height and width of an image in pixels, m its objects, S side of a crop.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megavis.config.errors import UserError
from megavis.data.codecs.codec import Codec, Payloads, Refusals
from megavis.data.codecs.jpeg import DamagedImageError, decode_rgb, refusals, split
from megavis.data.codecs.label_maps import MAX_SEGMENTS, painted
from megavis.data.codecs.transforms import Transform

MAX_OBJECTS = 100
"""Largest number of objects of an image in training; if a crop has more, the largest are kept."""


def require_dense(what: str) -> None:
    """Raise UserError unless pycocotools and torchvision are installed; `what` needs them."""
    for module in ("pycocotools", "torchvision"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{what} needs {module}: pip install 'megavis[dense]'")


class InstancesCodec(Codec):
    """An image and its objects other than crowds, as a structured array.

    Its fields are `image` uint8 `[S, S, 3]`, `classes` int16 `[MAX_OBJECTS]`, 0 where there is no
    object, and `masks` uint8 `[MAX_OBJECTS, S, S / 8]`, each bit a pixel.

    Args:
        transform: crop and flip, to a side that is a multiple of 8.
    """

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    def decode(self, payloads: Payloads, positions: np.ndarray) -> tuple[np.ndarray, Refusals]:
        """Decode to structured samples `[b]`."""
        transform = self._transform
        draws, side = transform.draws(positions), transform.image_size
        form = [
            ("image", np.uint8, (side, side, 3)),
            ("classes", np.int16, (MAX_OBJECTS,)),
            ("masks", np.uint8, (MAX_OBJECTS, side, side // 8)),
        ]
        samples = np.zeros(len(payloads), form)

        def fill(row: int, payload: np.ndarray) -> None:
            image, target = split(bytes(payload))
            samples["image"][row] = transform(decode_rgb(image), draws[row])
            annotation = read_objects(target)
            own = [each for each in annotation["objects"] if not each["crowd"]]
            if not own:
                return
            moved = transform(masks_of(annotation["size"], own), draws[row], is_map=True)
            sizes = moved.sum((0, 1), dtype=np.int64)
            # Keep the largest, in the order of the annotation.
            kept = np.sort(np.argsort(-sizes, kind="stable")[:MAX_OBJECTS])
            kept = kept[sizes[kept] > 0]
            samples["classes"][row, : len(kept)] = [own[place]["class"] for place in kept.tolist()]
            bits = np.packbits(moved[..., kept].transpose(2, 0, 1), axis=2)
            samples["masks"][row, : len(kept)] = bits

        return samples, refusals(payloads, fill)


def read_objects(target: bytes) -> dict[str, Any]:
    """Return the annotation in a payload. Raises DamagedImageError."""
    try:
        annotation: dict[str, Any] = json.loads(target)
        return annotation
    except ValueError as error:
        raise DamagedImageError(str(error)) from None


def masks_of(size: Sequence[int], objects: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return the masks of objects of an image of h and w pixels, uint8 `[h, w, m]`."""
    from pycocotools import mask as coco

    lengths = [{"size": list(size), "counts": each["mask"].encode()} for each in objects]
    masks: np.ndarray = coco.decode(lengths)
    return np.ascontiguousarray(masks)


def painted_objects(classes: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Color the objects of a decoded sample for display: uint8 `[S, S, 3]`, black between them.

    Args:
        classes: int16 `[m]`.
        masks: uint8 `[m, S, S / 8]`.
    """
    shown = np.unpackbits(masks, axis=2)
    pixels = np.zeros((*shown.shape[1:], 3), np.uint8)
    for number, (label, mask) in enumerate(zip(classes.tolist(), shown, strict=True), start=1):
        if label:
            pixels[mask > 0] = ((label - 1) % MAX_SEGMENTS + 1, number, 0)
    return painted(pixels, "panoptic")
