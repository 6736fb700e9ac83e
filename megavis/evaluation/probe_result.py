"""Result of a linear probe, and its file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from megavis.config.errors import UserError
from megavis.data.format.files import write_atomically
from megavis.evaluation.concatenation import ConcatenatedScore
from megavis.evaluation.linear import LayerScore, best_layer
from megavis.evaluation.low_data import LowDataScore


@dataclass(frozen=True)
class ProbeResult:
    """All numbers of a probe.

    Attributes:
        step: optimizer steps of the trained network.
        trained: a score for each layer of the run's network.
        untrained: the same of networks with the same config and fresh weights, one after another.
        pixels: the score of raw pixels.
        num_fitted: training images that candidates were fitted on.
        num_held_out: training images that layer and penalty were chosen on.
        num_validation: images that the accuracies are of.
        num_classes: classes among the training images.
        num_views: random draws of each validation image's inputs.
        seed: of the division.
        splits: shard folders: `train`, `validation`, and `selection` where there is one.
        num_equal: validation images that are in the shards that were trained or fitted on as
            well; None where that was too much to compare.
        concatenated: adjacent layers together, the trained network first; empty if not asked for.
        low_data: with few labels, of the trained network, the first untrained one and of raw
            pixels; empty if not asked for.
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
        """The trained network's layer that is best on the held-out training images."""
        return best_layer(self.trained)

    @property
    def untrained_accuracy(self) -> float:
        """The mean over the untrained networks of their best layers' accuracies.

        What an untrained network is good for depends on its random colours; hence several.
        """
        return statistics.mean(best_layer(scores).accuracy for scores in self.untrained)

    def write(self, path: Path) -> None:
        """Write everything as JSON, whole or not at all. Raises OSError."""
        content = {
            "best_layer": dataclasses.asdict(self.best),
            "untrained_accuracy": self.untrained_accuracy,
            **dataclasses.asdict(self),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=2).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> ProbeResult:
        """Read what `write` wrote.

        Raises:
            UserError: when there is no such file, or it holds something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            names = {each.name for each in dataclasses.fields(cls)}
            return _RESULT.validate_python({k: v for k, v in content.items() if k in names})
        except (OSError, ValueError, AttributeError):
            raise UserError(f"{path}: holds no result of `megavis probe`") from None


_RESULT = TypeAdapter(ProbeResult)
