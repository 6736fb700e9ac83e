"""Linear probe of a run, with raw pixels and untrained networks as baselines.

All use the same images, the same split of the training images and the same procedure; only the
features differ.

With few labels, iGPT, section 4.7 and Table 4: 4, 25 or 400 images per class, 5 random subsets,
mean and standard deviation. A penalty is selected by cross-validation within each subset, so labels
outside it affect only the choice of the layer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset, Subset, sample_per_class
from megavis.data.loading.labels import check_numbering
from megavis.data.loading.leakage import Shards, check_no_overlap
from megavis.evaluation.features import LabelledFeatures, pixel_features
from megavis.evaluation.likelihood import mean_loss
from megavis.evaluation.linear import (
    STANDARDIZED,
    FitRecipe,
    HeldOutSplit,
    adjacent_layers,
    choose_penalty,
    divide,
    fit_classifier,
    score_concatenated,
    score_layers,
)
from megavis.evaluation.networks import Network
from megavis.evaluation.results import (
    ConcatenatedScore,
    LayerScore,
    LowDataScore,
    ProbeResult,
    best_layer,
)
from megavis.tokenizers.palette import Palette

Pair = tuple[LabelledFeatures, LabelledFeatures]
"""Features of the training and of the validation images."""
_HELD_OUT_SHARE = 0.2
"""Fraction of the training images to select layer and penalty on, without a `selection` set."""
_MOST_FOLDS = 5
"""Largest number of folds of a cross-validation; at most the number of images per class."""


@dataclass(frozen=True)
class ProbeData:
    """The images of a probe.

    Attributes:
        selection: images for selecting layer and penalty, which are then fitted too; None to use a
            part of the training images.
        num_equal: validation images that are also in the other sets, at most 1 %; None if these
            are too large to compare.

    Raises:
        UserError: the sets number their classes differently, or the validation images were trained
            on.
    """

    train: ShardDataset | Subset
    validation: ShardDataset | Subset
    palette: Palette | None = None
    num_train: int | None = None
    num_validation: int | None = None
    selection: ShardDataset | Subset | None = None
    trained_on: Sequence[Shards] = ()
    num_equal: int | None = field(init=False)

    def __post_init__(self) -> None:
        for other in (self.validation, self.selection):
            if other is not None:
                trained, place = self.train.class_names, str(self.train.directory)
                names = other.class_names
                check_numbering(other.directory, names, trained, source=place, folder=place)
        fitted = [self.train] if self.selection is None else [self.train, self.selection]
        equal = check_no_overlap(self.validation, [*fitted, *self.trained_on])
        object.__setattr__(self, "num_equal", equal)

    def pixels(self) -> Pair:
        """Return the pixels of the training images, with `selection` last, and of validation."""

        def read(dataset: ShardDataset | Subset, limit: int | None) -> LabelledFeatures:
            return pixel_features(dataset, palette=self.palette, limit=limit)

        return self._fitted(read), read(self.validation, self.num_validation)

    def features(self, network: Network, *, num_views: int = 1) -> Pair:
        """Return a network's features in the same form, with `num_views` validation views.

        Collective over all processes of a job; only the main one gets the features.
        """

        def read(dataset: ShardDataset | Subset, limit: int | None) -> LabelledFeatures:
            return network.features(dataset, limit=limit)

        validation = network.features(
            self.validation, limit=self.num_validation, num_views=num_views
        )
        return self._fitted(read), validation

    @property
    def splits(self) -> Mapping[str, str]:
        """The shard folders, for the record."""
        folders = {"train": self.train, "selection": self.selection, "validation": self.validation}
        return {name: str(folder.directory) for name, folder in folders.items() if folder}

    def check(self, settings: ProbeSettings, *, num_features: int) -> None:
        """Check, before features are computed, that there are enough images and layers.

        Args:
            num_features: layers with features.

        Raises:
            UserError: there are too few of them.
        """
        if settings.concatenate:
            adjacent_layers(0, count=settings.concatenate, num_features=num_features)
        labels = self.train.labels[: self.num_train]
        if self.selection is not None:
            labels = np.concatenate([labels, self.selection.labels])
        for count in settings.images_per_class:
            _draw_subset(labels, count, seed=settings.seed, draw=0)

    def divide(self, labels: np.ndarray, settings: ProbeSettings) -> HeldOutSplit:
        """Split images with labels int64 `[b]` to select layer and penalty. Raises UserError."""
        if self.selection is None:
            return divide(labels, share=_HELD_OUT_SHARE, seed=settings.seed)
        first = len(labels) - int((self.selection.labels >= 0).sum())
        fitted, held_out = np.split(np.arange(len(labels)), [first])
        # Classes that are not fitted count as wrong: few images of many classes lack some.
        if not set(labels[held_out]) & set(labels[fitted]):
            raise UserError(
                f"{self.selection.directory} cannot select the layer: its images need labels, some"
                " of them of classes in the training images"
            )
        return HeldOutSplit(fitted, held_out)

    def _fitted(
        self, read: Callable[[ShardDataset | Subset, int | None], LabelledFeatures]
    ) -> LabelledFeatures:
        train = read(self.train, self.num_train)
        return train if self.selection is None else train.followed_by(read(self.selection, None))


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a probe.

    Attributes:
        seed: seed of the split of the training images, and of subsets.
        concatenate: number of adjacent layers to score together, around the best one; 0 for none.
        images_per_class: subset sizes to score with few labels.

    Raises:
        UserError: a value is too small.
    """

    layers: Sequence[int] | None = None
    seed: int = 0
    concatenate: int = 0
    images_per_class: Sequence[int] = ()
    draws: int = 5
    recipe: FitRecipe = STANDARDIZED

    def __post_init__(self) -> None:
        if min(self.images_per_class, default=2) < 2 or self.draws < 2:
            raise UserError("--images-per-class and --draws must be at least 2")


def probe(
    trained: Pair,
    untrained: Iterable[Pair],
    data: ProbeData,
    *,
    step: int,
    settings: ProbeSettings | None = None,
    run: str | None = None,
) -> ProbeResult:
    """Probe the layers of a network, of untrained networks, and raw pixels.

    Args:
        trained: `data.features` of the network.
        untrained: features of at least one network with fresh weights; consumed one at a time.
        step: of the network's weights, for the record, as its `run`.

    Raises:
        UserError: the images have no labels, or are too few.
    """
    settings = settings or ProbeSettings()
    pixels = data.pixels()
    selection = data.divide(pixels[0].labels, settings)
    recipe = settings.recipe
    pixel_score = score_layers(*pixels, selection, recipe=recipe)[0]
    low_data = score_low_data("pixels", *pixels, settings, layer=pixel_score.layer)
    scores: list[tuple[LayerScore, ...]] = []
    concatenated: list[ConcatenatedScore] = []
    for number, features in enumerate(itertools.chain([trained], untrained)):
        name = "untrained" if number else "trained"
        of_layers = score_layers(*features, selection, layers=settings.layers, recipe=recipe)
        scores.append(tuple(of_layers))
        best, count = best_layer(scores[-1]), settings.concatenate
        if count:
            together = score_concatenated(
                name, *features, selection, centre=best.layer, count=count, recipe=recipe
            )
            concatenated.append(together)
        if number < 2:
            low_data += score_low_data(name, *features, settings, layer=best.layer)
    return ProbeResult(
        best_layer=best_layer(scores[0]),
        untrained_accuracy=statistics.mean(best_layer(each).accuracy for each in scores[1:]),
        step=step,
        trained=scores[0],
        untrained=tuple(scores[1:]),
        pixels=pixel_score,
        num_fitted=len(selection.fitted),
        num_held_out=len(selection.held_out),
        num_validation=len(pixels[1].labels),
        num_classes=len(set(pixels[0].labels.tolist())),
        num_views=len(trained[1].views),
        seed=settings.seed,
        classifier=recipe.name,
        splits=data.splits,
        num_equal=data.num_equal,
        concatenated=tuple(concatenated),
        low_data=tuple(low_data),
        run=run,
    )


def score_best_layer(features: Pair, data: ProbeData, settings: ProbeSettings) -> LayerScore:
    """Return only the score of the best layer, of a network or of pixels; raises as `probe`."""
    selection = data.divide(features[0].labels, settings)
    scores = score_layers(*features, selection, layers=settings.layers, recipe=settings.recipe)
    return best_layer(scores)


def score_low_data(
    name: str,
    train: LabelledFeatures,
    validation: LabelledFeatures,
    settings: ProbeSettings,
    *,
    layer: int,
) -> list[LowDataScore]:
    """Score one layer's features with few labels per class, over several draws.

    The subsets are the same for all features; `name` describes these, for the record.

    Raises:
        UserError: a class has fewer images than `images_per_class`.
    """
    scores = []
    for count in settings.images_per_class:
        subsets = [
            train.subset(_draw_subset(train.labels, count, seed=settings.seed, draw=draw))
            for draw in range(settings.draws)
        ]
        accuracies = [_accuracy(few, validation, layer, count, settings.recipe) for few in subsets]
        mean, deviation = statistics.fmean(accuracies), statistics.stdev(accuracies)
        scores.append(LowDataScore(name, layer, count, tuple(accuracies), mean, deviation))
    return scores


def _draw_subset(labels: np.ndarray, count: int, *, seed: int, draw: int) -> np.ndarray:
    try:
        return sample_per_class(labels, count, seed=seed, draw=draw)
    except UserError as error:
        text = f"--images-per-class {count}: {error}; use more with --train-images"
        raise UserError(text) from None


def _accuracy(
    few: LabelledFeatures, validation: LabelledFeatures, layer: int, count: int, recipe: FitRecipe
) -> float:
    from sklearn.model_selection import StratifiedKFold

    x, y = few.layers[layer], few.labels
    folds = StratifiedKFold(min(count, _MOST_FOLDS), shuffle=True, random_state=0)
    best = choose_penalty(x, y, [HeldOutSplit(*parts) for parts in folds.split(x, y)], recipe)
    classifier = fit_classifier(x, y, penalty=best.penalty, standardize=recipe.standardize)
    return float(classifier.score(validation.layers[layer], validation.labels))


@dataclass(frozen=True)
class CheckpointScore:
    """One checkpoint: a point of iGPT's Figure 3.

    Attributes:
        validation_loss: the objective's mean loss over `loss_images`.
        layer: best layer on held-out training images.
        accuracy: of its linear probe on the validation images, in [0, 1].
        penalty: of the probe, selected on held-out training images like the layer.
        num_validation: labelled validation images.
        seed: of the probe's split of the training images.
        classifier: name of the recipe by which classifiers were fitted.
        loss_images: shard folder for the loss.
    """

    run: str
    step: int
    validation_loss: float
    layer: int
    accuracy: float
    penalty: float
    num_train: int
    num_validation: int
    seed: int
    classifier: str
    loss_images: str
    num_loss_images: int


def score_checkpoint(
    name: str,
    step: int,
    network: Network,
    data: ProbeData,
    settings: ProbeSettings,
    *,
    loss_images: ShardDataset | Subset,
    num_loss_images: int | None = None,
) -> CheckpointScore:
    """Return the loss on the first `loss_images`, and the accuracy of the best layer's probe.

    Raises as `probe`.
    """
    features = data.features(network)
    num_train, num_validation = (len(part.labels) for part in features)
    best = score_best_layer(features, data, settings)
    loss = mean_loss(network.inference, network.objective, loss_images, limit=num_loss_images)
    return CheckpointScore(
        run=name,
        step=step,
        validation_loss=loss,
        layer=best.layer,
        accuracy=best.accuracy,
        penalty=best.penalty,
        num_train=num_train,
        num_validation=num_validation,
        seed=settings.seed,
        classifier=settings.recipe.name,
        loss_images=str(loss_images.directory),
        num_loss_images=min(num_loss_images or len(loss_images), len(loss_images)),
    )
