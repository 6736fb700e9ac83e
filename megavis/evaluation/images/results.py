"""Results of comparing images, as files: see `megavis/evaluation/results.py`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from megavis.evaluation.result_files import INLINE, Form, Result, Row


@dataclass(frozen=True)
class NetworkName(Form):
    """Description of a feature network, shown with each result.

    Attributes:
        is_published: whether it gives the published metrics.
    """

    name: str
    sha256: str
    resize: str
    is_published: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.sha256[:8]}"


@dataclass(frozen=True)
class ImageSet(Form):
    """A set of images; `num_manifold` is the number of vectors for precision and recall."""

    source: str
    sha256: str
    num_images: int | None
    num_manifold: int


@dataclass(frozen=True, kw_only=True)
class SamplesResult(Result):
    """Metrics of two sets of images, with their conditions.

    The published network gives `fid`, `sfid` and `inception_score`; others give
    `frechet_distance`, `spatial_frechet_distance` and `class_score`.

    Attributes:
        title: name of the distance.
        neighbors: k of precision and recall.
        class_score_splits: number of splits of the class score, which are random;
            `inception_score_in_order` and `class_score_in_order` are of consecutive ones.
        caution: why the metrics are not comparable with published ones; None if they are.
    """

    command = "`megavis evaluate samples`"
    title: str
    fid: float | None = None
    frechet_distance: float | None = None
    sfid: float | None = None
    spatial_frechet_distance: float | None = None
    inception_score: float | None = None
    inception_score_std: float | None = None
    inception_score_in_order: float | None = None
    class_score: float | None = None
    class_score_std: float | None = None
    class_score_in_order: float | None = None
    precision: float | None = None
    recall: float | None = None
    network: NetworkName
    samples: ImageSet
    reference: ImageSet
    neighbors: int
    class_score_splits: int
    caution: str | None

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics by name."""
        return {key: value for key, value in vars(self).items() if isinstance(value, float)}

    @property
    def distance_key(self) -> str:
        """Key of the distance: `fid`, or `frechet_distance`."""
        return "fid" if self.network.is_published else "frechet_distance"

    @property
    def distance(self) -> float:
        """The Fréchet distance."""
        return self.numbers[self.distance_key]

    @property
    def line(self) -> str:
        """Metrics, N, network, reference and resize in one line."""
        numbers, splits = self.numbers, self.class_score_splits
        labels = {
            "sfid": "sFID",
            "spatial_frechet_distance": "spatial",
            "inception_score": f"inception score (mean of {splits} random splits)",
            "inception_score_in_order": "of splits in order",
            "class_score": f"exp KL of its classes (mean of {splits} random splits)",
            "class_score_in_order": "of splits in order",
            "precision": "precision",
            "recall": "recall",
        }
        words = [f"{self.title}: {self.distance:.4g}"]
        words += [f"{label} {numbers[k]:.4g}" for k, label in labels.items() if k in numbers]
        return f"{', '.join(words)} | {self.conditions}"

    @property
    def conditions(self) -> str:
        """Conditions of the metrics: N, network, reference and resize."""
        known = self.reference.num_images
        count = "of another tool, N unknown" if known is None else f"N {known}"
        return (
            f"N {self.samples.num_images} of {self.samples.source},"
            f" {measured_by(self.network, self.reference.source, self.reference.sha256)} ({count}),"
            f" resize {self.network.resize}"
        )


def measured_by(network: NetworkName, reference: str, sha256: str) -> str:
    """Return network and reference of a distance, as `SamplesResult.conditions` names them."""
    return f"network {network}, reference {reference} {sha256[:8]}"


@dataclass(frozen=True)
class NamedRight(Form):
    """Fractions of images, in [0, 1], that are classified correctly: of all, and by class."""

    images: int
    overall: float
    classes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ClassesResult(Result):
    """A classifier, fitted on the shards `train`, on shards `real` and samples `drawn`."""

    command = "`megavis evaluate classes`"
    real_images: NamedRight
    reconstructions: NamedRight | None = None
    samples: NamedRight
    train: str
    real: str
    drawn: str
    epochs: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ReconstructionResult(Result):
    """Means over images of the shard folder `of`: PSNR in dB, SSIM and others; set distance.

    `identical` images, if there are any, have an infinite PSNR and are left out of its mean.
    """

    command = "`megavis evaluate reconstruction`"
    step: int
    images: int
    of: str
    psnr: float
    ssim: float
    perceptual_vgg16: float | None = None
    perceptual_alexnet: float | None = None
    lpips_vgg16: float | None = None
    lpips_alexnet: float | None = None
    identical: int | None = None
    distance: SamplesResult | None = None


@dataclass(frozen=True)
class CompletedImage(Row):
    """PSNR in dB of one image's lower part."""

    command = "`megavis figure completions`"
    image: int
    psnr_completed: float
    psnr_mean_of_completions: float
    psnr_last_row_repeated: float


@dataclass(frozen=True, kw_only=True)
class FillingScores(Form):
    """Images whose hidden part was predicted; see `score_filling`."""

    psnr: float
    psnr_of_images: float
    perceptual_vgg16: float | None = None
    perceptual_alexnet: float | None = None
    lpips_vgg16: float | None = None
    lpips_alexnet: float | None = None


@dataclass(frozen=True)
class FilledInGroups(Row):
    """Scores by number of groups in which hidden tokens are predicted."""

    command = "`megavis figure groups`"
    groups: int
    scores: FillingScores = field(metadata=INLINE)


@dataclass(frozen=True)
class FilledHidden(Row):
    """Scores of the predicted hidden patches, and of their mean colours."""

    command = "`megavis figure reconstructions`"
    hidden: str
    scores: FillingScores = field(metadata=INLINE)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Form):
    """Sampling options given on the command line; None for the run's own."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    sampling_steps: int | None = None
    probability: float | None = None
    guidance: float | None = None
    guidance_power: float | None = None
    guidance_schedule: str | None = None
    beams: int | None = None
    fans: int | None = None
    rounds: int | None = None
    choice_temperature: float | None = None
    groups: int | None = None


@dataclass(frozen=True)
class Quality(Form):
    """Panoptic, segmentation and recognition quality in percent: means over classes that occur."""

    pq: float
    sq: float
    rq: float
    classes: int


@dataclass(frozen=True)
class DepthScores(Form):
    """Means over images: RMSE in metres; `delta2` is the fraction of ratios below 1.25²."""

    rmse: float
    abs_rel: float
    log10: float
    delta1: float
    delta2: float
    delta3: float


@dataclass(frozen=True)
class LabelMapResult(Result):
    """Label maps, reconstructed or predicted from images of the shard folder `of`."""

    step: int
    images: int
    of: str
    seed: int
    options: SamplingOptions = field(metadata=INLINE)


@dataclass(frozen=True)
class PanopticResult(LabelMapResult):
    """Quality of panoptic maps; `metric` and `value` are for published tables."""

    command = "`megavis evaluate panoptic`"
    metric: ClassVar[str] = "PQ"
    overall: Quality
    things: Quality
    stuff: Quality

    @property
    def value(self) -> float:
        """PQ of all classes in percent."""
        return self.overall.pq


@dataclass(frozen=True)
class DepthResult(LabelMapResult):
    """Errors of depth maps; see `PanopticResult`."""

    command = "`megavis evaluate depth`"
    metric: ClassVar[str] = "RMSE"
    overall: DepthScores

    @property
    def value(self) -> float:
        """RMSE in metres."""
        return self.overall.rmse


@dataclass(frozen=True)
class BaselineAnswer(Row):
    """A baseline prediction of label maps without a model."""

    command = "`python -m benchmarks.label_map_baselines`"
    answer: str
    scores: Quality | DepthScores = field(metadata=INLINE)


@dataclass(frozen=True)
class MomentDifferences(Form):
    """Largest differences over channels; see `largest_differences`."""

    mean: float
    deviation: float
    horizontal: float
    vertical: float


@dataclass(frozen=True)
class ChannelMoments(Form):
    """Moments of each channel; see `moments_of`."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    horizontal: tuple[float, ...]
    vertical: tuple[float, ...]


@dataclass(frozen=True)
class MomentsResult(Result):
    """Generated latents compared with held-out ones, and training latents too if stored."""

    command = "`megavis sample --moments`"
    options: SamplingOptions = field(metadata=INLINE)
    num_drawn: int
    num_held_out: int
    largest_difference: MomentDifferences
    drawn: ChannelMoments
    held_out: ChannelMoments
    training_difference: MomentDifferences | None = None
