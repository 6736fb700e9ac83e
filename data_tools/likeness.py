"""Similarity of images to a reference collection, by a linear classifier.

Logistic regression on colour and texture, or on features of a trained network, between the pictures
that one wants more of and a random sample of the web (as language models' text is
filtered, Brown et al., Language Models are Few-Shot Learners, appendix A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_HELD_OUT = 5  # every fifth picture tests the classifier


@dataclass(frozen=True)
class Likeness:
    """A trained classifier.

    Attributes:
        model: from features `[n, D]` to probabilities.
        area: how well it separates the two collections on images that it was not trained on:
            area under the ROC curve, 0.5 is chance.
    """

    model: Any
    area: float

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return the likeness float64 `[n]` in [0, 1] of features `[n, D]`; 0.5 is undecided."""
        if not len(features):
            return np.zeros(0)
        return self.model.predict_proba(features.astype(np.float32))[:, 1]


def fit_likeness(wanted: np.ndarray, found: np.ndarray) -> Likeness:
    """Train on features `[n, D]` of what is wanted and `[m, D]` of what was found.

    Both weigh the same, however many there are. The same input gives the same classifier.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    features = np.concatenate([wanted, found]).astype(np.float32)
    labels = np.repeat([1, 0], [len(wanted), len(found)])
    places = np.concatenate([np.arange(len(wanted)), np.arange(len(found))])
    test = places % _HELD_OUT == _HELD_OUT - 1
    model = make_pipeline(
        StandardScaler(), LogisticRegression(C=0.1, max_iter=2000, class_weight="balanced")
    )
    # Threads would sum in another order on another machine.
    with threadpool_limits(1):
        model.fit(features[~test], labels[~test])
        scores = model.predict_proba(features[test])[:, 1]
    both = len(set(labels[test])) == 2
    return Likeness(model, float(roc_auc_score(labels[test], scores)) if both else float("nan"))
