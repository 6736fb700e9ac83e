"""Result of a linear probe, and its JSON file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from megavis.config.errors import UserError
from megavis.data.format.files import write_json
from megavis.evaluation.linear import ConcatenatedScore, LayerScore, best_layer
from megavis.evaluation.low_data import LowDataScore


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe.

    Attributes:
        step: optimizer steps of the trained network.
        trained: scores of the run's network by layer.
        untrained: the same for networks with the same config and fresh weights.
        pixels: score of raw pixels.
        num_fitted: training images on which candidates were fitted.
        num_held_out: training images on which layer and penalty were selected.
        num_validation: images for the accuracies.
        num_classes: classes among the training images.
        num_views: random draws of each validation image's inputs.
        splits: shard folders: `train`, `validation` and, if given, `selection`.
        num_equal: validation images that are also in the other shards; None if these were too
            large to compare.
        concatenated: concatenated adjacent layers, the trained network first; may be empty.
        low_data: with few labels, for the trained network, the first untrained one and raw pixels;
            may be empty.
    """

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
    splits: Mapping[str, str] = field(default_factory=dict)
    num_equal: int | None = None
    concatenated: tuple[ConcatenatedScore, ...] = ()
    low_data: tuple[LowDataScore, ...] = ()

    @property
    def best(self) -> LayerScore:
        """Best layer of the trained network on the held-out training images."""
        return best_layer(self.trained)

    @property
    def untrained_accuracy(self) -> float:
        """Mean over the untrained networks of their best layers' accuracies.

        This depends on their random initialization; hence several networks.
        """
        return statistics.mean(best_layer(scores).accuracy for scores in self.untrained)

    def write(self, path: Path) -> None:
        """Write the result as JSON atomically. Raises OSError."""
        content = {
            "best_layer": dataclasses.asdict(self.best),
            "untrained_accuracy": self.untrained_accuracy,
            **dataclasses.asdict(self),
        }
        write_json(path, content)

    @classmethod
    def read(cls, path: Path) -> ProbeResult:
        """Read a result. Raises UserError: the file is missing, or has another format."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            names = {each.name for each in dataclasses.fields(cls)}
            return _RESULT.validate_python({k: v for k, v in content.items() if k in names})
        except (OSError, ValueError, AttributeError):
            raise UserError(f"{path} is not a result of `megavis probe`") from None


_RESULT = TypeAdapter(ProbeResult)
