"""Measurements of images for `filter`: size, hashes, colour and texture; near-duplicates.

Measurements are stored as shards of 1 KB per image (suffix `msr`), so that measuring resumes, runs
on many machines and is not repeated when a threshold changes.

Near-duplicates by perceptual hash are an exact search in memory. Two hashes of 64 bits that differ
in at most t bits are equal in one of t + 1 bands ("Fast Search in Hamming Space with Multi-Index
Hashing", Norouzi, Punjani and Fleet, section 3), and in k of t + k, so only pairs that are equal in
some k bands are compared. More bands are more sorts and fewer comparisons, which is what many
hashes require.

Features of a trained network may replace colour and texture. `filter` is the only data tool that
opens a run of any paper; all others need only tokenizers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data_tools import __version__
from data_tools.decode import RefusedImageError, decode_image
from data_tools.resize import resize_name, resized, versions
from data_tools.shard_tasks import Encoded, ShardEncoder
from data_tools.sources import SourceImage
from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import MANIFEST
from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import (
    FORMAT_VERSION,
    PALETTE_NAME,
    Manifest,
    Preparation,
    SourceIdentity,
)
from megavis.data.format.shards import ShardIndex, map_file

if TYPE_CHECKING:
    from megavis.notebook import Run


_SIDE = 64  # images are resized to this for features
_COLORS = 4  # levels per channel
_CELLS = 2
_DIRECTIONS = 8
_LEVELS = 8
_LARGEST = float(np.finfo(np.float16).max)
NUM_FEATURES = _COLORS**3 + (_CELLS**2 + 1) * _DIRECTIONS + _LEVELS


def measurement(num_features: int = NUM_FEATURES) -> np.dtype:
    """Return the dtype: size in pixels, perceptual hash, SHA-256 of the file, features."""
    return np.dtype(
        [
            ("width", "<u4"),
            ("height", "<u4"),
            ("perceptual", "<u8"),
            ("sha256", "u1", 32),
            ("features", "<f2", num_features),
        ]
    )


@dataclass(frozen=True)
class MeasurementEncoder(ShardEncoder):
    """Decode and measure images; features of a network may replace colour and texture."""

    network: RunFeatures | None = None
    suffix: str = "msr"

    def settings(self, folder: str) -> dict[str, Any]:
        """Return everything that affects the values."""
        found = versions(None if self.network is None else "torch")
        network = {} if self.network is None else {"network": self.network.sha256}
        return {
            "measurement": 1,
            "versions": {**found, "imagehash": version("ImageHash")},
            **network,
        }

    def encode(self, pictures: list[SourceImage]) -> list[Encoded]:
        """Return the measurement of each image."""
        decoded = [_pixels_or_refusal(picture) for picture in pictures]
        good = [pixels for pixels in decoded if isinstance(pixels, np.ndarray)]
        vectors = iter(map(features, good) if self.network is None else self.network(good))
        return [
            pixels
            if isinstance(pixels, RefusedImageError)
            else [[measure(picture.content, pixels, next(vectors)).tobytes()]]
            for picture, pixels in zip(pictures, decoded, strict=True)
        ]

    def describe(self, folder: str) -> dict[str, Any]:
        """Measurements have no manifest."""
        raise AssertionError("measurements have no manifest")


def check_installed() -> None:
    """Raise UserError if the package for perceptual hashes is missing."""
    if importlib.util.find_spec("imagehash") is None:
        raise UserError("filter needs ImageHash: run `pip install 'megavis[web]'`")


def _pixels_or_refusal(picture: SourceImage) -> np.ndarray | RefusedImageError:
    try:
        return decode_image(picture.content)
    except RefusedImageError as refusal:
        return refusal


def measure(content: bytes, pixels: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return the measurement of an image, shape `[]`, from file, pixels and features `[D]`.

    Features are clipped to the range of float16.
    """
    measured = np.zeros((), measurement(len(vector)))
    measured["height"], measured["width"] = pixels.shape[:2]
    measured["sha256"] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
    measured["perceptual"] = perceptual_hash(pixels)
    measured["features"] = vector.clip(-_LARGEST, _LARGEST)
    return measured


def perceptual_hash(pixels: np.ndarray) -> int:
    """Return ImageHash's `phash` of an image uint8 `[h, w, 3]` as 64 bits, first bit highest."""
    import imagehash

    return int(str(imagehash.phash(Image.fromarray(pixels))), 16)


def features(pixels: np.ndarray) -> np.ndarray:
    """Return features of colour and texture of an image uint8 `[h, w, 3]`: float32 `[D]` in [0, 1].

    Computed at 64x64 pixels: the square roots of a joint histogram of 4x4x4 colours; of histograms
    of 8 directions of the grey gradient, weighted by its length, for each quadrant and the whole;
    and of a histogram of 8 levels of its length.
    """
    small = np.asarray(Image.fromarray(pixels).resize((_SIDE, _SIDE), Image.Resampling.BOX))
    level = (small // (256 // _COLORS)).astype(np.int64)
    color = _histogram((level[..., 0] * _COLORS + level[..., 1]) * _COLORS + level[..., 2], 64)
    down, right = np.gradient(small.astype(np.float32).mean(axis=2))
    length = np.hypot(down, right)
    turn = (np.arctan2(down, right) / np.pi) % 1.0  # direction of a line, without sign
    direction = np.minimum((turn * _DIRECTIONS).astype(np.int64), _DIRECTIONS - 1)
    half = _SIDE // _CELLS
    cells = [np.s_[top : top + half, left : left + half] for top in (0, half) for left in (0, half)]
    texture = [
        _histogram(direction[cell], _DIRECTIONS, length[cell]) for cell in (*cells, np.s_[:, :])
    ]
    steps = np.minimum(np.log2(1 + length).astype(np.int64), _LEVELS - 1)
    return np.sqrt(np.concatenate([color, *texture, _histogram(steps, _LEVELS)]))


def _histogram(values: np.ndarray, size: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Return a normalized histogram of `size` values, float32 `[size]`; zeros without weight."""
    counts = np.bincount(
        values.ravel(), None if weights is None else weights.ravel(), minlength=size
    )
    return (counts / max(counts.sum(), 1e-9)).astype(np.float32)


def measured_units(directory: Path) -> Iterator[tuple[int, Path, ShardIndex]]:
    """Yield number, tar and index of each unit of a finished folder of measurements, in order."""
    for path in sorted(directory.glob("shard-*.index.json")):
        index = ShardIndex.from_json(path.read_bytes(), path=path)
        number = int(index.shard.split("-")[1].split(".")[0])
        yield number, directory / index.shard, index


def read_measurements(tar: Path, index: ShardIndex) -> np.ndarray:
    """Read the measurements `[n]` of a unit. Raises UserError if its tar is missing."""
    if not len(index):  # every image was rejected, so there is no tar
        return np.zeros(0, measurement())
    size = index.lengths[0]
    kind = measurement((size - measurement(0).itemsize) // 2)
    places = np.array(index.offsets)[:, None] + np.arange(size)
    return np.asarray(map_file(tar))[places].view(kind)[:, 0]


MAX_DISTANCE = 10  # beyond it bands are so narrow that most pairs share one
_BITS = 64
_SORT = 30
"""What sorting a hash costs, in comparisons of two."""
_PAIRS_AT_ONCE = 1 << 20  # as Python's numbers


def close_pairs(hashes: np.ndarray, *, distance: int) -> np.ndarray:
    """Return all pairs of hashes uint64 `[n]` that differ in at most `distance` bits, 0 to 10.

    The result is int64 `[m, 2]`: sorted pairs of indices i < j.
    """
    found = [np.empty((0, 2), np.int64)]
    masks = [np.uint64(mask) for mask in band_masks(len(hashes), distance=distance)]
    for number, mask in enumerate(masks):
        masked = hashes & mask
        order = np.argsort(masked)
        for pairs in _pairs_of_band(masked[order], hashes[order], order, distance):
            differ = hashes[pairs[:, 0]] ^ hashes[pairs[:, 1]]
            new = np.ones(len(pairs), bool)
            for earlier in masks[:number]:  # which has found what is equal there
                new &= (differ & earlier) != 0
            found.append(np.sort(pairs[new], axis=1))
    pairs = np.concatenate(found)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


def search_cost(count: int, num_bands: int, *, distance: int) -> float:
    """Return the comparisons for each of `count` evenly distributed hashes, sorts among them."""
    equal_bits = _BITS * (num_bands - distance) / num_bands
    return math.comb(num_bands, distance) * (_SORT + count / 2 ** (equal_bits + 1))


def best_bands(count: int, *, distance: int) -> int:
    """Return the number of bands with which the search among `count` hashes is the shortest."""
    choices = range(distance + 1, distance + 6)
    return min(choices, key=lambda bands: search_cost(count, bands, distance=distance))


def band_masks(count: int, *, distance: int) -> list[int]:
    """Return masks of 64 bits, in one of which any two hashes of at most `distance` are equal."""
    num_bands = best_bands(count, distance=distance)
    edges = np.linspace(0, _BITS, num_bands + 1).round().astype(int).tolist()
    bands = [(1 << high) - (1 << low) for low, high in itertools.pairwise(edges)]
    return [sum(chosen) for chosen in itertools.combinations(bands, num_bands - distance)]


def _pairs_of_band(
    band: np.ndarray, hashes: np.ndarray, order: np.ndarray, distance: int
) -> list[np.ndarray]:
    """Compare each hash with the following ones of equal bands, at increasing distance."""
    found: list[np.ndarray] = []
    first = np.arange(len(band))
    for step in itertools.count(1):
        first = first[first + step < len(band)]
        # Sorted: bands that differ at this step differ at later ones too.
        first = first[band[first] == band[first + step]]
        if not len(first):
            return found
        near = first[np.bitwise_count(hashes[first] ^ hashes[first + step]) <= distance]
        found.append(np.stack([order[near], order[near + step]], axis=1))
    raise AssertionError("the loop ends by itself")


def find_duplicates(hashes: np.ndarray, *, distance: int, num_fixed: int = 0) -> np.ndarray:
    """Keep hashes uint64 `[n]` greedily: drop each one that is close to an earlier kept one.

    The first `num_fixed` are always kept. Returns int64 `[n]`: for dropped hashes the index of a
    close kept one; -1 for kept ones.
    """
    duplicate_of = np.full(len(hashes), -1, np.int64)
    if not len(hashes):
        return duplicate_of
    # A thousand copies of a placeholder would give half a million pairs: compare only the first
    # copy, since the others share its result.
    _, places, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    first_of = places[inverse]
    del inverse  # each takes gigabytes
    firsts = np.sort(places)
    del places
    pairs = firsts[close_pairs(hashes[firsts], distance=distance)]
    pairs = pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):
        for i, j in pairs[start : start + _PAIRS_AT_ONCE].tolist():
            if j >= num_fixed and duplicate_of[j] < 0 and duplicate_of[i] < 0:
                duplicate_of[j] = i
    copies = np.flatnonzero(first_of != np.arange(len(hashes)))
    copies = copies[copies >= num_fixed]
    kept = duplicate_of[first_of[copies]] < 0
    duplicate_of[copies] = np.where(kept, first_of[copies], duplicate_of[first_of[copies]])
    return duplicate_of


@dataclass(frozen=True)
class RunFeatures:
    """Output of the norm in the middle of a run's network, averaged over tokens.

    The middle layers of generative models have the best features (Generative Pretraining
    from Pixels, section 4.1).

    Attributes:
        run_folder: folder of the run, opened once per process.
        sha256: hash of its newest checkpoint's manifest, which has the hashes of all weights.
        width: D, features per image.
    """

    run_folder: Path
    sha256: str
    width: int

    @classmethod
    def open(cls, run_folder: Path) -> RunFeatures:
        """Open the newest checkpoint of a run, which must have layers and take images."""
        sha256 = _identity(run_folder)
        run = _opened(run_folder.resolve(), sha256)
        if not run.config.model.num_layers or not _takes_pictures(run):
            raise UserError(f"{run_folder} has no layers or no image inputs: choose another run")
        return cls(run_folder.resolve(), sha256, run.config.model.hidden_size)

    def __call__(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Return features float32 `[n, D]` of images uint8 `[h, w, 3]` of any size.

        Images are resized to the network's input without regard to their aspect ratio, as in the
        measurement of colour and texture.
        """
        if not pictures:
            return np.empty((0, self.width), np.float32)
        run = _opened(self.run_folder, self.sha256)
        side = run.config.data.image_size
        squares = [resized(each, height=side, width=side, library="torch") for each in pictures]
        middle = run.config.model.num_layers // 2
        features: np.ndarray = run.features(np.stack(squares), layer=middle).cpu().numpy()
        return features


def _identity(run_folder: Path) -> str:
    checkpoint = latest_checkpoint(run_folder)
    if checkpoint is None:
        raise UserError(f"{run_folder} has no checkpoint: give the folder of a trained run")
    return sha256_of_file(checkpoint / MANIFEST)


def _takes_pictures(run: Run) -> bool:
    if (run.folder / PALETTE_NAME).exists():
        return True
    pictures = Manifest(
        format_version=FORMAT_VERSION,
        kind="jpeg",
        image_size=run.config.data.image_size or None,
        preparation=Preparation(resize=resize_name("torch"), crop="none", decoders={}),
        class_names=(),
        shards=(),
        skipped={},
        seed=0,
        source=SourceIdentity(description="a picture", num_files=0, sha256="0" * 64),
        tool_version=__version__,
    )
    return not list(run.objective.check_data(pictures))


@functools.lru_cache(maxsize=1)
def _opened(run_folder: Path, sha256: str) -> Run:
    import torch

    from megavis.notebook import Run

    torch.set_num_threads(1)  # the same summation order on any machine
    if _identity(run_folder) != sha256:
        raise UserError(f"{run_folder} was trained further since this job began: use another --out")
    return Run.open(run_folder, device="cpu")
