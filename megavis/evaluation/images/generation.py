"""Compare generated with real images: Fréchet distance, class score, precision and recall.

A `FeatureCollector` summarizes one set of images, batch by batch; `compare` compares two sets.

Statistics of reference images are `.npz` files. `mu` and `sigma`, and `mu_s` and `sigma_s` of
spatial features, have the names of pytorch-fid and of ADM's reference batches, so files are
interchangeable with these tools. megavis's files also have `features` of some images, for precision
and recall, and `about`, a JSON description of network and images. ADM's files also have some of the
images in `arr_0`.

Legend: N images, b of a batch, d features.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megavis.config.errors import UserError
from megavis.data.format.files import sha256_of_file, write_atomically
from megavis.evaluation.images.feature_networks import FeatureNetwork
from megavis.evaluation.images.results import ImageSet, NetworkName, SamplesResult
from megavis.evaluation.images.set_metrics import (
    NEIGHBORS,
    Gaussian,
    RunningClassScore,
    RunningGaussian,
    frechet_distance,
    precision_and_recall,
)

PUBLISHED_COUNT = 50_000
"""Number of samples in published tables."""
FEWEST_REFERENCES = 10_000
"""Number of images in the smallest reference that is in use, CIFAR-10's test set."""
MANIFOLD_COUNT = 50_000
"""Largest number of feature vectors of a set that are kept for precision and recall."""


@dataclass(frozen=True)
class FeatureSummary:
    """Summary of a set of images.

    Attributes:
        network: network of the features; None for statistics of other tools, which lack it.
        source: path of the images.
        num_images: N; None if unknown.
        spatial: statistics of the spatial features, if any.
        features: float32 `[m, d]` of evenly spaced images, if kept.
        class_score: mean and standard deviation over random splits; None without logits.
        score_in_order: mean over consecutive splits; None if the order of the images means nothing.
    """

    network: NetworkName | None
    source: str
    sha256: str
    num_images: int | None
    gaussian: Gaussian
    spatial: Gaussian | None = None
    features: Tensor | None = None
    class_score: tuple[float, float] | None = None
    score_in_order: float | None = None


class FeatureCollector:
    """Collect the features of one set of images.

    Args:
        num_kept: largest number of feature vectors to keep.
        in_order: compute the class score of consecutive splits too, as ADM's evaluator does.

    Raises:
        UserError: there is only one image, which has no covariance.
    """

    def __init__(
        self,
        network: FeatureNetwork,
        *,
        num_images: int,
        num_kept: int = MANIFOLD_COUNT,
        in_order: bool = False,
    ) -> None:
        if num_images < 2:
            raise UserError("a distribution needs at least 2 images")
        self._network, self._num_images = network, num_images
        self._gaussian, self._spatial = RunningGaussian(), RunningGaussian()
        self._score = RunningClassScore(num_images)
        self._in_order = RunningClassScore(num_images, in_order=True) if in_order else None
        self._kept: list[Tensor] = []
        count = min(num_kept, num_images)
        self._places = torch.arange(count) * num_images // max(count, 1)

    def add(self, images: Tensor) -> None:
        """Add the next images, uint8 `[b, H, W, 3]`."""
        seen = self._network(images)
        first = self._gaussian.count
        self._gaussian.add(seen.features)
        if seen.spatial is not None:
            self._spatial.add(seen.spatial)
        self._score.add(seen.logits)
        if self._in_order is not None:
            self._in_order.add(seen.logits)
        inside = (self._places >= first) & (self._places < first + len(images))
        self._kept.append(seen.features.cpu()[self._places[inside] - first])

    def summary(self, *, source: str, sha256: str) -> FeatureSummary:
        """Return the summary, after all N images were added."""
        assert self._gaussian.count == self._num_images
        features = torch.cat(self._kept)
        return FeatureSummary(
            self._network.about,
            source,
            sha256,
            self._num_images,
            self._gaussian.result(),
            self._spatial.result() if self._spatial.count else None,
            features if len(features) else None,
            self._score.result(),
            None if self._in_order is None else self._in_order.result()[0],
        )


def compare(
    samples: FeatureSummary, reference: FeatureSummary, *, device: torch.device
) -> SamplesResult:
    """Compare samples with a reference; raise UserError if features are of different networks."""
    network = samples.network
    assert network is not None
    _check_networks(network, samples, reference)
    numbers = {_key("distance", network): frechet_distance(samples.gaussian, reference.gaussian)}
    if samples.spatial is not None and reference.spatial is not None:
        numbers[_key("spatial", network)] = frechet_distance(samples.spatial, reference.spatial)
    if samples.class_score is not None:
        mean, deviation = samples.class_score
        numbers |= {_key("score", network): mean, f"{_key('score', network)}_std": deviation}
    if samples.score_in_order is not None:
        numbers[f"{_key('score', network)}_in_order"] = samples.score_in_order
    parts = (samples.features, reference.features)
    if all(part is not None and len(part) > NEIGHBORS for part in parts):
        found = precision_and_recall(*(part.to(device) for part in parts if part is not None))
        numbers |= dict(zip(("precision", "recall"), found, strict=True))
    title = f"Fréchet distance (features of {network.name}), not FID"
    return SamplesResult(
        title="FID" if network.is_published else title,
        **numbers,
        network=network,
        samples=_image_set(samples),
        reference=_image_set(reference),
        neighbors=NEIGHBORS,
        class_score_splits=RunningClassScore(samples.num_images or 0).num_splits,
        caution=_caution(samples, reference),
    )


def _image_set(summary: FeatureSummary) -> ImageSet:
    num_manifold = 0 if summary.features is None else len(summary.features)
    return ImageSet(summary.source, summary.sha256, summary.num_images, num_manifold)


def _caution(samples: FeatureSummary, reference: FeatureSummary) -> str | None:
    num_images, size = samples.num_images or 0, len(samples.gaussian.mean)
    known = reference.num_images
    if num_images >= PUBLISHED_COUNT and known is not None and known < FEWEST_REFERENCES:
        return (
            f"the distance falls with the images of the reference too, which are {known:,}, fewer"
            f" than the {FEWEST_REFERENCES:,} of any published one: compare only with the same"
            " reference"
        )
    if num_images >= PUBLISHED_COUNT:
        return None
    fewer = f", fewer than the {size} features, so that the covariance is singular"
    return (
        f"the distance falls with N; published results use {PUBLISHED_COUNT:,} samples, these"
        f" are {num_images:,}{fewer if num_images < size else ''}: compare only with equal N"
    )


def _key(number: str, network: NetworkName) -> str:
    """Return the key of a metric; published names are for the published network only."""
    names = {
        "distance": ("frechet_distance", "fid"),
        "spatial": ("spatial_frechet_distance", "sfid"),
        "score": ("class_score", "inception_score"),
    }
    return names[number][network.is_published]


def _check_networks(
    network: NetworkName, samples: FeatureSummary, reference: FeatureSummary
) -> None:
    theirs = reference.network
    if theirs is not None and theirs != network:
        raise UserError(
            f"the features of {reference.source} are of {theirs} ({theirs.resize}), not of"
            f" {network} ({network.resize})"
        )
    ours, given = len(samples.gaussian.mean), len(reference.gaussian.mean)
    if ours != given:
        raise UserError(f"{reference.source} has {given} features, {network} has {ours}")


def write_statistics(path: Path, summary: FeatureSummary) -> None:
    """Write the summary of a set of images. Raises OSError."""
    assert summary.network is not None
    about = {
        "images": summary.source,
        "images_sha256": summary.sha256,
        "num_images": summary.num_images,
        "network": vars(summary.network),
    }
    arrays = _named("", summary.gaussian) | {"about": np.array(json.dumps(about))}
    if summary.spatial is not None:
        arrays |= _named("_s", summary.spatial)
    if summary.features is not None:
        arrays["features"] = summary.features.numpy()
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def read_statistics(path: Path) -> FeatureSummary:
    """Read statistics written by megavis or another tool; raise UserError for other content."""
    try:
        with np.load(path, allow_pickle=False) as file:
            # Skip arr_0 of ADM's files, which has 2 GB.
            arrays = {name: file[name] for name in file.files if name != "arr_0"}
        about = json.loads(str(arrays["about"])) if "about" in arrays else {}
        network = NetworkName(**about["network"]) if about else None
        gaussian = _gaussian(arrays, "")
        spatial = _gaussian(arrays, "_s") if "mu_s" in arrays else None
    except (KeyError, TypeError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a statistics file: {error}") from None
    features = torch.from_numpy(arrays["features"]) if "features" in arrays else None
    return FeatureSummary(
        network,
        str(path),
        sha256_of_file(path),
        about.get("num_images"),
        gaussian,
        spatial,
        features,
    )


def _named(suffix: str, gaussian: Gaussian) -> dict[str, np.ndarray]:
    names = {f"mu{suffix}": gaussian.mean, f"sigma{suffix}": gaussian.covariance}
    return {name: tensor.numpy() for name, tensor in names.items()}


def _gaussian(arrays: dict[str, np.ndarray], suffix: str) -> Gaussian:
    mean, covariance = _float(arrays[f"mu{suffix}"]), _float(arrays[f"sigma{suffix}"])
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"{list(mean.shape)} and {list(covariance.shape)}"
        raise ValueError(f"mu{suffix} and sigma{suffix} have shapes {shapes}")
    return Gaussian(mean, covariance)


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.float64))
