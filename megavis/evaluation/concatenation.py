"""Linear probe on concatenated features of adjacent layers.

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
    """The score of a classifier on several layers' features.

    Attributes:
        features: `trained` or `untrained`.
        layers: the adjacent layers.
        num_features: their total width.
        penalty: the chosen weight of the L2 penalty.
        selection_accuracy: see `LayerScore`.
        selection_loss: see `LayerScore`.
        accuracy: see `LayerScore`.
        vote_accuracy: see `LayerScore`.
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
    """Return `count` adjacent layers of 0 .. `num_features` - 1, centered if possible.

    At either end of the network the window is shifted inward.

    Raises:
        UserError: there are fewer layers.
    """
    if not 0 < count <= num_features:
        raise UserError(
            f"--concatenate {count}: the network has features of {num_features} layers;"
            f" choose a number from 1 to {num_features}"
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
    """Score `count` concatenated adjacent layers by the same procedure as a single layer.

    Args:
        name: name of the features, for the record.
        train: features for fitting.
        validation: features for evaluation only.
        selection: split of `train`.
        centre: the best single layer.
        count: number of layers.
        recipe: of the fits.

    Raises:
        UserError: there are fewer layers.
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
