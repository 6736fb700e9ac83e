"""Baselines for label maps without a model, which a model should exceed.

    python -m benchmarks.label_map_baselines shards/panoptic --run runs/givt_panoptic

Panoptic maps: one segment of the most common class, and the map of the nearest training image.
Depths: the mean training map, and the map of the nearest training image. Training maps are resized
to 64² and then enlarged to the held-out original, as predictions are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megavis.data.codecs.jpeg import decode_png, split
from megavis.data.codecs.label_maps import nearest, to_numbers, to_pixels
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.images.pair_metrics import DepthErrors, PanopticQuality
from megavis.evaluation.images.results import BaselineAnswer, DepthScores, Quality

_SIDE, _LOOK = 64, 8
"""Sides of the predicted maps, and of the blocks over which images are compared."""


def main() -> None:
    """Print the scores of each baseline as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the shard folders train and validation")
    parser.add_argument(
        "--run", type=Path, help="write them to RUN/evaluation too, for `megavis report`"
    )
    arguments = parser.parse_args()
    folder = arguments.folder
    train, held_out = (
        ShardDataset(folder / part, Transform(_SIDE, crop="center"))
        for part in ("train", "validation")
    )
    pairs = train.read(np.arange(len(train)))[0]
    assert train.manifest.target is not None
    is_depth = train.manifest.target.kind == "depth"
    constant = _mean_depth(pairs[:, 1]) if is_depth else _one_segment(pairs[:, 1])
    index = _thumbnails(pairs[:, 0])

    def neighbour(image: np.ndarray) -> np.ndarray:
        distances = np.square(index - _thumbnails(image[None])).sum((1, 2, 3))
        found: np.ndarray = pairs[distances.argmin(), 1]
        return found

    answers: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "mean map" if is_depth else "one segment": lambda image: constant,
        "nearest training image": neighbour,
    }
    found = []
    for name, answer in answers.items():
        found.append(BaselineAnswer(name, _score(held_out, answer, is_depth=is_depth)))
        sys.stdout.write(json.dumps(found[-1].record()) + "\n")
    if arguments.run is not None:
        BaselineAnswer.write(arguments.run / "evaluation" / "label_map_baselines.json", found)


def _score(
    held_out: ShardDataset, answer: Callable[[np.ndarray], np.ndarray], *, is_depth: bool
) -> Quality | DepthScores:
    assert held_out.manifest.target is not None
    errors, quality = DepthErrors(), PanopticQuality(len(held_out.manifest.target.class_names))
    for number in range(len(held_out)):
        image = held_out.read(np.array([number]))[0][0, 0]
        truth = decode_png(split(held_out.payload(number))[1])
        guess = nearest(answer(image), height=truth.shape[0], width=truth.shape[1])
        (errors if is_depth else quality).add(truth, guess)
    return errors.scores() if is_depth else quality.quality()


def _one_segment(maps: np.ndarray) -> np.ndarray:
    label = np.bincount(maps[..., 0].reshape(-1)).argmax()
    return np.broadcast_to(np.array([label, 1, 0], np.uint8), maps.shape[1:])


def _mean_depth(maps: np.ndarray) -> np.ndarray:
    numbers = to_numbers(maps)
    measured = np.maximum((numbers > 0).sum(0), 1)
    return to_pixels((numbers.sum(0, dtype=np.int64) / measured).round().astype(np.int64))


def _thumbnails(images: np.ndarray) -> np.ndarray:
    """Return the means of 8 by 8 pixels, float64 `[b, 8, 8, 3]`, of images `[b, 64, 64, 3]`."""
    parts = images.reshape(len(images), _LOOK, _SIDE // _LOOK, _LOOK, _SIDE // _LOOK, 3)
    return parts.mean((2, 4))


if __name__ == "__main__":
    main()
