"""The papers, one folder each; `megavis.config.papers` finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from megavis.config.papers import Papers, paper_class

if TYPE_CHECKING:
    from megavis.composition.trainable import Trainable
    from megavis.config.schema import RunConfig
    from megavis.parallel.context import ParallelContext

OBJECTIVES: Mapping[str, type[Trainable]] = Papers(paper_class)
"""Papers by name."""


def build_objective(config: RunConfig, context: ParallelContext) -> Trainable:
    """Build the config's model, with the head of a task on top in a fine-tuning run."""
    model = OBJECTIVES[config.objective.name](config, context)
    if config.finetune is None:
        return model
    from megavis.composition.classification import Classification
    from megavis.composition.instances import Instances
    from megavis.composition.model import Model
    from megavis.composition.segmentation import Segmentation

    assert isinstance(model, Model), "the config's checks require one with blocks"
    tasks: Mapping[str, Callable[[Model], Trainable]] = {
        "classes": Classification,
        "segments": Segmentation,
        "instances": Instances,
    }
    return tasks[config.finetune.task](model)
