"""Compare images with their originals: completions, filled parts, reconstructions, label maps.

The lower part of an image is completed from the rows above; the baseline repeats the last given
row. The score is the peak signal-to-noise ratio of the completed part. The completion with the
least squared error is the mean over all possible ones: even a sample from the true distribution has
twice its squared error. Therefore both single completions and the mean of several are scored.

Label maps are encoded as in shards (`data/codecs/label_maps.py`). Panoptic quality: "Panoptic
Segmentation" (Kirillov et al., 2019), section 4.1; void and crowds are treated as in the authors'
code (panopticapi). Depth on NYU Depth v2, as in GIVT's released code: errors are computed per image
over the pixels with a depth between 1 mm and 10 m, then averaged over images.

Legend: b images, n completions per image, h and w (H and W) their height and width in pixels, c
classes including void.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.data.codecs.label_maps import UNITS_A_METRE, to_numbers
from megavis.data.format.files import sha256_of_file
from megavis.data.format.manifest import MANIFEST_NAME
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.loader import evaluation_batches
from megavis.evaluation.images.feature_networks import FeatureNetwork
from megavis.evaluation.images.generation import FeatureCollector, compare
from megavis.evaluation.images.results import CompletedImage, DepthScores, Quality, SamplesResult
from megavis.model.autoencoder_losses import PerceptualDistance
from megavis.model.inference import Inference

_BATCH_SIZE = 64


WINDOW = 11
_SIGMA = 1.5
_RANGE = 255.0
_C1, _C2 = (0.01 * _RANGE) ** 2, (0.03 * _RANGE) ** 2
"""SSIM's window and standard deviation in pixels, range of values, and constants."""


def repeat_last_row(images: Tensor, num_rows: int) -> Tensor:
    """Replace the rows of images `[b, h, w, 3]` from `num_rows` on by the row before them."""
    last = images[:, num_rows - 1 : num_rows].expand(-1, images.shape[1] - num_rows, -1, -1)
    return torch.cat([images[:, :num_rows], last], dim=1)


def signal_to_noise(made: Tensor, true: Tensor) -> Tensor:
    """Return the PSNR of each image in dB, 10 log₁₀(255² / mean squared error): float64 `[b]`.

    Values are in 0 .. 255, and shapes may broadcast; equal images give infinity.
    """
    errors = (made.double() - true.double()).square().flatten(1).mean(1)
    return 10.0 * torch.log10(255.0**2 / errors)


@dataclass(frozen=True)
class Completions:
    """PSNR in dB, over all pixels of all images and per image."""

    completed: float
    mean: float
    """PSNR of the mean of an image's completions."""
    repeated: float
    rows: Sequence[CompletedImage]


def count_rows(given: Tensor) -> int:
    """Return the number of rows in the given part bool `[b, h, w]` of images.

    Raises:
        UserError: the given part is not the first rows of every image.
    """
    height, num_rows = given.shape[1], int(given[0, :, 0].sum())
    rows = (torch.arange(height, device=given.device) < num_rows)[None, :, None]
    if not 0 < num_rows < height or not torch.equal(given, rows.expand_as(given)):
        raise UserError(
            "the run's order does not start with whole rows, so there is no last row to repeat"
        )
    return num_rows


def score_completions(originals: Tensor, completed: Tensor, given: Tensor) -> Completions:
    """Compare completions `[n, b, h, w, 3]` with originals outside the given part `[b, h, w]`.

    Raises:
        UserError: the given part is not the first rows of every image.
    """
    num_rows = count_rows(given)
    true = originals[:, num_rows:]
    drawn = completed[:, :, num_rows:].transpose(0, 1)
    made = {
        "completed": drawn,
        "mean_of_completions": drawn.double().mean(1, keepdim=True),
        "last_row_repeated": repeat_last_row(originals, num_rows)[:, None, num_rows:],
    }
    scores = {name: signal_to_noise(part, true[:, None]).tolist() for name, part in made.items()}
    completed_db, mean_db, repeated_db = (
        float(signal_to_noise(part[None], true[None, :, None])) for part in made.values()
    )
    table = [
        CompletedImage(i, **{f"psnr_{name}": score[i] for name, score in scores.items()})
        for i in range(len(originals))
    ]
    return Completions(completed_db, mean_db, repeated_db, table)


def score_filling(
    originals: Tensor, made: Tensor, hidden: Tensor, *, perceptual: PerceptualDistance | None = None
) -> dict[str, float]:
    """Compare images with a predicted part to the originals, uint8 `[b, h, w, 3]` each.

    They are equal outside the `hidden` pixels, bool `[b, h, w]`, which were predicted.

    Returns:
        `psnr`: in dB, over the hidden pixels of all images; `psnr_of_images`: the mean over images
        of the PSNR over all pixels; and the mean of the distance by its name, `lpips_alexnet`.
    """
    scores = {
        "psnr": float(signal_to_noise(made[hidden][None], originals[hidden][None])),
        "psnr_of_images": float(signal_to_noise(made, originals).mean()),
    }
    if perceptual is not None:
        pairs = zip(made.split(_BATCH_SIZE), originals.split(_BATCH_SIZE), strict=True)
        distances = torch.cat([perceptual(_pixels(a), _pixels(b)) for a, b in pairs])
        scores[perceptual.name] = float(distances.mean())
    return scores


def _pixels(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2).float() / 255.0


def reconstructions(
    inference: Inference, objective: Trainable, dataset: Samples, *, num_images: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first images and their reconstructions, uint8 `[b, H, W, 3]` each.

    Reconstruction is deterministic: a VAE decodes the posterior mean.
    """
    for batch in evaluation_batches(dataset, batch_size=_BATCH_SIZE, limit=num_images):
        originals = batch.inputs.to(inference.context.device)
        made = objective.reconstruction(inference.predictions(objective.inputs_from(originals)))
        yield objective.shown(originals), made


class PairScores:
    """Mean scores of pairs of images and reconstructions."""

    def __init__(self, perceptual: PerceptualDistance | None = None) -> None:
        self._perceptual = perceptual
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, originals: Tensor, made: Tensor) -> None:
        """Add pairs of uint8 `[b, H, W, 3]`; raise UserError if they are too small for a metric."""
        scores = {
            "psnr": signal_to_noise(made, originals),
            "ssim": structural_similarity(made, originals),
        }
        if self._perceptual is not None:
            with torch.no_grad():
                distance = self._perceptual(_pixels(made), _pixels(originals))
            scores[self._perceptual.name] = distance
        for name, values in scores.items():
            self._values[name] += values.tolist()

    def means(self) -> dict[str, float]:
        """Return `psnr` in dB, `ssim`, and the perceptual distance by its name.

        The PSNR of identical pairs is infinite, and a single one would be the mean of all: they are
        left out, unless all are identical.
        """
        finite = [value for value in self._values["psnr"] if math.isfinite(value)]
        values = {**self._values, "psnr": finite or self._values["psnr"]}
        return {name: fmean(of_pairs) for name, of_pairs in values.items()}

    @property
    def num_identical(self) -> int:
        """Number of pairs without any difference."""
        return sum(map(math.isinf, self._values["psnr"]))


class Distances:
    """Fréchet distance between reconstructions and originals.

    Args:
        num_images: number of pairs to come.

    Raises:
        UserError: there are fewer than 2 pairs.
    """

    def __init__(self, network: FeatureNetwork, *, num_images: int) -> None:
        # Precision and recall are not computed for reconstructions.
        self._originals, self._made = (
            FeatureCollector(network, num_images=num_images, num_kept=0) for _ in range(2)
        )

    def add(self, originals: Tensor, made: Tensor) -> None:
        """Add pairs of images uint8 `[b, H, W, 3]`."""
        self._originals.add(originals)
        self._made.add(made)

    def result(self, *, run: Path, originals: Path) -> SamplesResult:
        """Return the comparison; `originals` is the shard folder of the originals."""
        digest = sha256_of_file(originals / MANIFEST_NAME)
        return compare(
            self._made.summary(source=f"{originals} through {run}", sha256=digest),
            self._originals.summary(source=str(originals), sha256=digest),
            device=torch.device("cpu"),
        )


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return the SSIM of pairs in 0 .. 255, float64 `[b]`; raise UserError below 11² pixels."""
    if min(first.shape[1:3]) < WINDOW:
        size = "×".join(map(str, first.shape[1:3]))
        raise UserError(f"SSIM needs images of at least {WINDOW}² pixels; these have {size}")
    x, y = (images.double().movedim(3, 1) for images in (first, second))
    mean_x, mean_y, mean_xx, mean_yy, mean_xy = _windows(torch.stack([x, y, x * x, y * y, x * y]))
    variances = mean_xx - mean_x**2 + mean_yy - mean_y**2
    covariance = mean_xy - mean_x * mean_y
    likeness = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return (likeness / ((mean_x**2 + mean_y**2 + _C1) * (variances + _C2))).flatten(1).mean(1)


def _windows(planes: Tensor) -> Tensor:
    """Return the weighted mean of every window: `[..., H, W]` to `[..., H - 10, W - 10]`."""
    places = torch.arange(WINDOW, device=planes.device, dtype=planes.dtype) - WINDOW // 2
    weights = torch.exp(-0.5 * (places / _SIGMA) ** 2)
    weights = weights / weights.sum()
    flat = planes.reshape(-1, 1, *planes.shape[-2:])
    means = F.conv2d(F.conv2d(flat, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return means.view(*planes.shape[:-2], *means.shape[-2:])


_MIN_DEPTH, _MAX_DEPTH = 1e-3, 10.0
"""In metres."""
_RATIO = 1.25


class PanopticQuality:
    """Accumulates matches over maps.

    Attributes:
        overlaps: float64 `[c]`, sums of the IoU of matched segments.
        matched: int64 `[c]`, true positives.
        spurious: int64 `[c]`, false positives.
        missed: int64 `[c]`, false negatives.
    """

    def __init__(self, num_classes: int) -> None:
        """Set up for classes 1 to `num_classes`."""
        self.overlaps = np.zeros(num_classes + 1)
        self.matched, self.spurious, self.missed = np.zeros((3, num_classes + 1), np.int64)

    def add(self, truth: np.ndarray, predicted: np.ndarray) -> None:
        """Compare a map with a prediction, uint8 `[h, w, 3]` each.

        Two segments of a class match if their IoU, whose union leaves out void pixels of the truth,
        is above 0.5; crowds never match. A predicted segment without a match is a false positive
        unless more than half of it is in void or in a crowd of its class.
        """
        segments = np.stack([_segments(truth), _segments(predicted)], axis=-1).reshape(-1, 2)
        pairs, counts = np.unique(segments, axis=0, return_counts=True)
        shared = {(int(a), int(b)): int(n) for (a, b), n in zip(pairs, counts, strict=True)}
        sizes: list[dict[int, int]] = [{}, {}]
        for pair, count in shared.items():
            for side, segment in zip(sizes, pair, strict=True):
                side[segment] = side.get(segment, 0) + count
        found = self._match(shared, *sizes)
        crowds = {}
        for segment in sorted(sizes[0].keys() - {0} - {a for a, _ in found}):
            if _is_crowd(segment):
                crowds[_class(segment)] = segment
            else:
                self.missed[_class(segment)] += 1
        for segment in sizes[1].keys() - {0} - {b for _, b in found}:
            crowd = crowds.get(_class(segment), -1)
            ignored = shared.get((0, segment), 0) + shared.get((crowd, segment), 0)
            if 2 * ignored <= sizes[1][segment]:
                self.spurious[_class(segment)] += 1

    def _match(
        self,
        shared: dict[tuple[int, int], int],
        true_sizes: dict[int, int],
        predicted_sizes: dict[int, int],
    ) -> list[tuple[int, int]]:
        found = []
        for (true, predicted), count in shared.items():
            if not true or not predicted or _is_crowd(true) or _class(true) != _class(predicted):
                continue
            void = shared.get((0, predicted), 0)
            union = true_sizes[true] + predicted_sizes[predicted] - count - void
            if 2 * count > union:
                self.overlaps[_class(true)] += count / union
                self.matched[_class(true)] += 1
                found.append((true, predicted))
        return found

    def quality(self, classes: Sequence[int] | None = None) -> Quality:
        """Return the means over `classes`, by default all; zeros if none of them occurs."""
        chosen = range(1, len(self.matched)) if classes is None else classes
        rows = []
        for number in chosen:
            hits = self.matched[number]
            weight = hits + 0.5 * self.spurious[number] + 0.5 * self.missed[number]
            if weight:
                overlap = self.overlaps[number]
                rows.append((overlap / weight, overlap / hits if hits else 0.0, hits / weight))
        if not rows:
            return Quality(0.0, 0.0, 0.0, 0)
        pq, sq, rq = (100.0 * part for part in np.mean(rows, axis=0).tolist())
        return Quality(pq, sq, rq, len(rows))


def _segments(pixels: np.ndarray) -> np.ndarray:
    """Return a number per segment, int64 `[h, w]`; 0 for void."""
    wide = pixels.astype(np.int64)
    numbers = wide[..., 0] + 256 * wide[..., 1] + 65536 * (wide[..., 2] > 0)
    return np.where(wide[..., 0] > 0, numbers, 0)


def _class(segment: int) -> int:
    return segment & 255


def _is_crowd(segment: int) -> bool:
    return segment >= 65536


class DepthErrors:
    """Accumulates the errors of images."""

    def __init__(self) -> None:
        """Start without images."""
        self._rows: list[dict[str, float]] = []

    def add(self, truth: np.ndarray, predicted: np.ndarray) -> None:
        """Compare depth maps of the same size, uint8 `[h, w, 3]`, encoded as in shards.

        Images without a depth in range are left out.
        """
        true, guess = (to_numbers(pixels) / UNITS_A_METRE for pixels in (truth, predicted))
        counts = (true > _MIN_DEPTH) & (true < _MAX_DEPTH)
        if not counts.any():
            return
        true, guess = true[counts], np.maximum(guess[counts], 1.0 / UNITS_A_METRE)
        ratio = np.maximum(true / guess, guess / true)
        row = {
            "rmse": np.sqrt(np.square(true - guess).mean()),
            "abs_rel": (np.abs(true - guess) / true).mean(),
            "log10": np.abs(np.log10(true) - np.log10(guess)).mean(),
        }
        row |= {f"delta{power}": (ratio < _RATIO**power).mean() for power in (1, 2, 3)}
        self._rows.append({name: float(value) for name, value in row.items()})

    def scores(self) -> DepthScores:
        """Return the means over images. Raises UserError if there are none."""
        if not self._rows:
            raise UserError(
                f"no image has a depth between {_MIN_DEPTH} and {_MAX_DEPTH:g} m, so there is"
                " nothing to compare"
            )
        first = self._rows[0]
        return DepthScores(**{key: float(np.mean([r[key] for r in self._rows])) for key in first})
