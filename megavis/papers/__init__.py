"""A paper is a folder, found by its name: its keys, `config.py`, and its model, `paper.py`.

The first imports no torch, so that a mistake in a config is reported at once; the second is
imported when the model is built. So a paper is added by its files alone, and a run imports no
other paper. A folder may hold variants of its paper: in `givt/`, `maskgit_config.py` and
`maskgit.py` are `givt_maskgit`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from megavis.config.schema import ObjectiveConfig, RunConfig

if TYPE_CHECKING:
    from megavis.composition.trainable import Trainable
    from megavis.parallel.context import ParallelContext

_Found = TypeVar("_Found")
_SUFFIX = "_config"


def objective_configs() -> Mapping[str, type[ObjectiveConfig]]:
    """Return the config class of each paper by name, each imported when it is looked up."""
    return _Papers(_config_type)


def build_objective(config: RunConfig, context: ParallelContext) -> Trainable:
    """Return the config's paper, with classes on top in a fine-tuning run."""
    paper = OBJECTIVES[config.objective.name](config, context)
    if config.finetune is None:
        return paper
    from megavis.composition.classification import Classification
    from megavis.composition.composition import Composition

    assert isinstance(paper, Composition), "the config's checks want one with blocks"
    return Classification(paper)


class _Papers(Mapping[str, _Found]):
    """What `find` finds for the name of each paper."""

    def __init__(self, find: Callable[[str], _Found]) -> None:
        self._find = find

    def __getitem__(self, name: str) -> _Found:
        """Return what is found; raises KeyError where there is no such paper."""
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        for room in (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg):
            folder = importlib.import_module(f"{__name__}.{room}")
            for module in pkgutil.iter_modules(folder.__path__):
                if module.name == "config":
                    yield room
                elif module.name.endswith(_SUFFIX):
                    yield f"{room}_{module.name.removesuffix(_SUFFIX)}"

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _modules(name: str) -> tuple[str, str]:
    """Return the modules of a paper's keys and model; raises KeyError where there are none."""
    parts = name.split("_")
    for end in range(len(parts), 0, -1):
        room, variant = "_".join(parts[:end]), "_".join(parts[end:])
        keys, model = (variant + _SUFFIX, variant) if variant else ("config", "paper")
        folder = f"{__name__}.{room}"
        if room.isidentifier() and find_spec(folder) and find_spec(f"{folder}.{keys}"):
            return f"{folder}.{keys}", f"{folder}.{model}"
    raise KeyError(name)


def _config_type(name: str) -> type[ObjectiveConfig]:
    """Return the config class whose `name` this is; raises KeyError where there is none."""
    keys, _ = _modules(name)
    for each in vars(importlib.import_module(keys)).values():
        is_config = isinstance(each, type) and issubclass(each, ObjectiveConfig)
        if is_config and each.model_fields["name"].default == name:
            return each
    raise KeyError(name)


def _objective_type(name: str) -> type[Trainable]:
    """Return the class that takes such configs; raises KeyError where there is no such paper."""
    keys = _config_type(name)
    for value in vars(importlib.import_module(_modules(name)[1])).values():
        if isinstance(value, type) and getattr(value, "config_type", None) is keys:
            return value
    raise KeyError(name)


OBJECTIVES: Mapping[str, type[Trainable]] = _Papers(_objective_type)
"""The class of each paper by name."""
