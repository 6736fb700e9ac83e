"""The linear probe on concatenated features of adjacent layers.

iGPT, section 4.4: "we concatenate features from 5 layers centered at the best single layer", which
gives iGPT-XL 15,360 features instead of 3,072.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.config.errors import UserError
from megavis.evaluation.features import LabelledFeatures
from megavis.evaluation.linear import (
    STANDARDIZED,
    FitRecipe,
    HeldOutSplit,
    LayerScore,
    score_layers,
)


@dataclass(frozen=True)
class ConcatenatedScore:
    """The classifier on several layers' features.

    Attributes:
        features: whose: `trained` or `untrained`.
        layers: which layers, adjacent ones.
        num_features: their widths together.
        penalty: the chosen weight of the L2 penalty.
        selection_accuracy: as in `LayerScore`.
        selection_loss: as in `LayerScore`.
        accuracy: as in `LayerScore`.
        vote_accuracy: as in `LayerScore`.
    """

    features: str
    layers: tuple[int, ...]
    num_features: int
    penalty: float
    selection_accuracy: float
    selection_loss: float
    accuracy: float
    vote_accuracy: float | None


def adjacent_layers(centre: int, *, count: int, num_features: int) -> tuple[int, ...]:
    """Return `count` adjacent layers of 0 .. `num_features` - 1 around one.

    At either end of the network they move inward, and the centre is no longer in their middle.

    Raises:
        UserError: when there are not so many.
    """
    if not 0 < count <= num_features:
        raise UserError(
            f"--concatenate {count}: the network gives features of {num_features} layers;"
            f" say a number from 1 to {num_features}"
        )
    first = min(max(centre - count // 2, 0), num_features - count)
    return tuple(range(first, first + count))


def score_concatenated(
    name: str,
    train: LabelledFeatures,
    validation: LabelledFeatures,
    selection: HeldOutSplit,
    *,
    centre: int,
    count: int,
    recipe: FitRecipe = STANDARDIZED,
) -> ConcatenatedScore:
    """Score `count` adjacent layers together, by the procedure of a single one.

    Args:
        name: whose features, for the record.
        train: features that classifiers are fitted on.
        validation: features that only report.
        selection: division of `train`.
        centre: the best single layer.
        count: how many layers.
        recipe: of the fits.

    Raises:
        UserError: when there are not so many.
    """
    layers = adjacent_layers(centre, count=count, num_features=len(train.layers))
    together = train.concatenated(layers)
    others = validation.concatenated(layers)
    score: LayerScore = score_layers(together, others, selection, recipe=recipe)[0]
    return ConcatenatedScore(
        features=name,
        layers=layers,
        num_features=together.layers.shape[-1],
        penalty=score.penalty,
        selection_accuracy=score.selection_accuracy,
        selection_loss=score.selection_loss,
        accuracy=score.accuracy,
        vote_accuracy=score.vote_accuracy,
    )
