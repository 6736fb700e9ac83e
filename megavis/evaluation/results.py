"""Results of evaluations, as files in `RUN/evaluation/`: each kind is a class that reads itself.

Names and order of the fields are those of the keys. Imports no torch, so that reports stay quick.

Legend: c classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from megavis.data.format.files import to_json, write_atomically
from megavis.evaluation.images.results import (
    BaselineAnswer,
    ClassesResult,
    CompletedImage,
    DepthResult,
    FilledHidden,
    FilledInGroups,
    PanopticResult,
    ReconstructionResult,
    SamplesResult,
)
from megavis.evaluation.result_files import INLINE, Form, Result, Row


@dataclass(frozen=True)
class LayerScore(Form):
    """The score of one layer's classifier.

    Attributes:
        layer: l, from 0.
        penalty: weight of ½‖w‖² relative to the mean cross-entropy.
        selection_accuracy: accuracy on the held-out training features, in [0, 1].
        selection_loss: cross-entropy on them, in nats.
        accuracy: accuracy on the validation set, in [0, 1], after fitting on all training
            features.
        vote_accuracy: accuracy of the majority vote over all views of each image; None for a
            single view.
    """

    layer: int
    penalty: float
    selection_accuracy: float
    selection_loss: float
    accuracy: float
    vote_accuracy: float | None


def best_layer(scores: Sequence[LayerScore]) -> LayerScore:
    """Return the best score on the held-out training features; the first of equal ones."""
    return max(scores, key=lambda score: (score.selection_accuracy, -score.selection_loss))


@dataclass(frozen=True)
class ConcatenatedScore(Form):
    """The score of a classifier on several layers' features; for the other fields see `LayerScore`.

    Attributes:
        features: `trained` or `untrained`.
    """

    features: str
    layers: tuple[int, ...]
    num_features: int
    penalty: float
    selection_accuracy: float
    selection_loss: float
    accuracy: float
    vote_accuracy: float | None


@dataclass(frozen=True)
class LowDataScore(Form):
    """Accuracy with few labels.

    Attributes:
        features: `trained`, `untrained` or `pixels`.
        accuracies: accuracy on the validation set for each draw, in [0, 1].
        deviation: sample standard deviation of the accuracies (divided by draws - 1).
    """

    features: str
    layer: int
    images_per_class: int
    accuracies: tuple[float, ...]
    mean: float
    deviation: float


@dataclass(frozen=True)
class ProbeResult(Result):
    """Result of a probe.

    Attributes:
        best_layer: best layer of the trained network on the held-out training images.
        untrained_accuracy: accuracy of the best layer, averaged over untrained networks, since it
            depends on their random initialization.
        trained: scores of the run's network by layer.
        untrained: the same for networks with the same config and fresh weights.
        num_fitted: training images on which candidates were fitted.
        num_held_out: training images on which layer and penalty were selected.
        num_validation: images for the accuracies.
        num_views: random draws of each validation image's inputs.
        classifier: name of the recipe by which classifiers were fitted.
        splits: shard folders: `train`, `validation` and, if given, `selection`.
        num_equal: validation images that are also in the other shards; None if these were too
            large to compare.
        concatenated: concatenated adjacent layers, the trained network first; may be empty.
        low_data: with few labels, for the trained network, the first untrained one and raw pixels;
            may be empty.
        run: name of the run; earlier files lack it.
    """

    command = "`megavis probe`"
    best_layer: LayerScore
    untrained_accuracy: float
    step: int
    trained: tuple[LayerScore, ...]
    untrained: tuple[tuple[LayerScore, ...], ...]
    pixels: LayerScore
    num_fitted: int
    num_held_out: int
    num_validation: int
    num_classes: int
    num_views: int
    seed: int
    classifier: str
    splits: Mapping[str, str]
    num_equal: int | None
    concatenated: tuple[ConcatenatedScore, ...]
    low_data: tuple[LowDataScore, ...]
    run: str | None = None


@dataclass(frozen=True)
class LikelihoodResult(Result):
    """Likelihood of held-out images under a network.

    Attributes:
        given: condition of the network, if any.
        nats_per_dimension: mean of -log p; may be negative for densities.
        bits_per_dimension: the same with logarithms to base 2.
        nats_per_image: sum over all dimensions.
    """

    command = "`megavis likelihood`"
    run: str
    step: int
    data: str
    num_images: int
    dimension: str
    dimensions_per_image: int
    given: str | None
    nats_per_dimension: float
    bits_per_dimension: float
    nats_per_image: float
    loss: float
    precision: str


@dataclass(frozen=True)
class ClassAccuracy(Form):
    """Accuracy of a classifier on a set of labelled images.

    Attributes:
        top1: fraction of images whose most likely class is correct, in [0, 1].
        top5: fraction whose class is among the five most likely (or all, if there are fewer).
        num_views: random draws of each image's inputs, such as BERT's masks.
        vote: fraction of images whose majority vote over views is correct; top1 for one view.
        confusion: `[c, c]`: images of each class (row) by predicted class (column).
    """

    num_images: int
    top1: float
    top5: float
    num_views: int
    vote: float
    confusion: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PixelAccuracy(Form):
    """Quality of predicted classes of pixels; shares are in [0, 1].

    Attributes:
        pixel_accuracy: share of the pixels whose class is correct.
        mean_accuracy: share of each class's pixels, averaged over the classes that occur.
        mean_iou: intersection over union, averaged over the classes that occur or were predicted.
        iou: of each class; None for those that neither occur nor were predicted.
        confusion: `[c, c]`: pixels of each class (row) by predicted class (column).
    """

    num_images: int
    pixel_accuracy: float
    mean_accuracy: float
    mean_iou: float
    iou: tuple[float | None, ...]
    confusion: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AveragePrecision(Form):
    """COCO's numbers of boxes or masks in [0, 1]; None where no object is of that size or class.

    Attributes:
        ap: average precision, over IoU of 0.5, 0.55, ..., 0.95 and all classes.
        ap50: average precision at an IoU of 0.5; `ap75`: at 0.75.
        ap_small: that of objects below 32² pixels; `ap_medium`: up to 96²; `ap_large`: above.
        ar1: average recall with 1 detection per image; `ar10`, `ar100`: with 10 and 100.
        ar_small: average recall by size, with 100 detections.
        by_class: average precision of each class.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ar1: float | None
    ar10: float | None
    ar100: float | None
    ar_small: float | None
    ar_medium: float | None
    ar_large: float | None
    by_class: tuple[float | None, ...]


@dataclass(frozen=True)
class DetectionAccuracy(Form):
    """Quality of detected objects, by boxes and by masks."""

    num_images: int
    box: AveragePrecision
    mask: AveragePrecision


def share_or_dash(value: float | None) -> str:
    """Return a share as `45.6%`, or a dash."""
    return "–" if value is None else f"{value:.1%}"


def _task(accuracy: object) -> str:
    keys = accuracy if isinstance(accuracy, dict) else vars(accuracy)
    if "box" in keys or "mask" in keys:
        return "instances"
    return "segments" if "pixel_accuracy" in keys or "mean_iou" in keys else "classes"


Part = Literal["selection", "test"]
"""Images on which a fine-tuned network is evaluated: those that select the step, and others."""


@dataclass(frozen=True)
class FinetuneResult(Result):
    """A fine-tuned network on the images of `data`, and sections of its config."""

    command = "`megavis finetune`"
    step: int
    part: Part
    data: str
    seed: int
    train: tuple[str, ...]
    num_train: int
    batch_size: int
    optimizer: Mapping[str, Any]
    finetune: Mapping[str, Any]
    accuracy: Annotated[
        Annotated[ClassAccuracy, Tag("classes")]
        | Annotated[PixelAccuracy, Tag("segments")]
        | Annotated[DetectionAccuracy, Tag("instances")],
        Discriminator(_task),
    ] = field(metadata=INLINE)
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class SegmentationResult(Result):
    """A network for segments on whole images of `data`; `stride`: pixels between windows."""

    command = "`megavis evaluate segmentation`"
    step: int
    data: str
    stride: int
    accuracy: PixelAccuracy = field(metadata=INLINE)
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class DetectionResult(Result):
    """A network for instances on whole images of `data`."""

    command = "`megavis evaluate detection`"
    step: int
    data: str
    accuracy: DetectionAccuracy = field(metadata=INLINE)
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class EnsembleRow(Form):
    """Top-1 and top-5 accuracy, in [0, 1], of a run or of all `together`."""

    run: str
    top1: float
    top5: float


@dataclass(frozen=True)
class EnsembleResult(Result):
    """Runs that classify the same images, and their mean if there are several."""

    command = "`megavis ensemble`"
    num_images: int
    rows: tuple[EnsembleRow, ...]


@dataclass(frozen=True)
class EarlyStoppingResult(Result):
    """The best step of pre-training with `training.patience`, with its accuracy in [0, 1]."""

    command = "`megavis train`"
    step: int
    validation_accuracy: float


@dataclass(frozen=True)
class SweepScore(Result):
    """A point of a sweep: accuracy, in [0, 1], of the best layer's probe."""

    command = "`megavis sweep`"
    step: int
    train_images: int
    accuracy: float

    def write(self, path: Path) -> None:
        """Write the file, of one line, atomically. Raises OSError."""
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, to_json(self.record()).encode())


_WATCH_SETTINGS = (
    "train_images", "validation_images", "seed", "train", "validation", "selection", "precision"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WatchedCheckpoint(Row):
    """The requested metrics of one checkpoint; numbers of images are maxima.

    `train`, `validation`, `selection` and `precision` are recorded if they are not the defaults.
    """

    command = "`megavis evaluate watch`"
    step: int
    validation_loss: float | None = None
    probe_accuracy: float | None = None
    probe_layer: int | None = None
    neighbors_accuracy: float | None = None
    neighbors_layer: int | None = None
    fid: float | None = None
    frechet_distance: float | None = None
    distance_of: str | None = None
    seconds: float
    train_images: int
    validation_images: int | None
    seed: int
    train: str | None = None
    validation: str | None = None
    selection: str | None = None
    precision: str | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """Options that the metrics depend on, besides those that `distance_of` names."""
        return tuple(getattr(self, name) for name in _WATCH_SETTINGS)

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics by name, and the seconds that they took."""
        others = ("step", "distance_of", *_WATCH_SETTINGS)
        return {key: value for key, value in self.record().items() if key not in others}


@dataclass(frozen=True)
class PositionAccuracy(Row):
    """Accuracies of predicted positions, in [0, 1].

    Attributes:
        mask_ratio: η in evaluation.
        accuracy: over all patches.
        of_context: over context patches.
        of_masked: over all others; NaN if there are none.
        chance: 1 / n.
    """

    command = "`megavis figure positions`"
    mask_ratio: float
    accuracy: float
    of_context: float
    of_masked: float
    chance: float


@dataclass(frozen=True)
class TransferScore(Form):
    """The score of one layer's classifier on another data set.

    Attributes:
        layer_from: how it was selected, `held-out images` or `--layer`.
        labels: training data: `all` training images, or `25 a class`.
        penalty: weight of ½‖w‖² relative to the mean cross-entropy; None with few labels, where
            each draw selects its own.
        selection_accuracy: accuracy on the held-out images, in [0, 1]; None with few labels.
        accuracy: accuracy on the test images; with few labels, the mean over draws.
        class_accuracy: mean of the accuracies per class; None with few labels.
        deviation: standard deviation of `accuracy` over draws of few labels, else None.
    """

    layer: int
    layer_from: str
    labels: str
    penalty: float | None
    selection_accuracy: float | None
    accuracy: float
    class_accuracy: float | None
    deviation: float | None


@dataclass(frozen=True)
class TransferRow(Row):
    """A score with its data set; `train`, `selection` and `test` describe the images."""

    command = "`megavis transfer`"
    data_set: str
    features: str
    step: int
    seed: int
    classifier: str
    score: TransferScore = field(metadata=INLINE)
    num_train: int
    num_held_out: int
    num_test: int
    num_equal: int | None
    num_classes: int
    train: str
    selection: str | None
    test: str


FORMS: Mapping[str, type[Result] | type[Row]] = {
    "probe.json": ProbeResult,
    "finetune_selection.json": FinetuneResult,
    "finetune_test.json": FinetuneResult,
    "segmentation.json": SegmentationResult,
    "detection.json": DetectionResult,
    "positions.csv": PositionAccuracy,
    "completions.csv": CompletedImage,
    "groups.csv": FilledInGroups,
    "reconstructions.csv": FilledHidden,
    "reconstruction.json": ReconstructionResult,
    "classes.json": ClassesResult,
    "likelihood.json": LikelihoodResult,
    "panoptic.json": PanopticResult,
    "depth_errors.json": DepthResult,
    "label_map_baselines.json": BaselineAnswer,
    "samples.json": SamplesResult,
    "transfer.csv": TransferRow,
    "watch.jsonl": WatchedCheckpoint,
}
"""The forms of files in `RUN/evaluation/` that reports show by name."""
