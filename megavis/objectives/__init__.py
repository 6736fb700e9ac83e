"""A paper is two modules, found by its name: its keys, NAME_config.py, and its model, NAME.py.

The first imports no torch, so that a mistake in a config is reported at once; the second is
imported when the model is built. So a paper is added by its files alone, and a run imports no
other paper.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from megavis.config.schema import ObjectiveConfig, RunConfig

if TYPE_CHECKING:
    from megavis.objectives.trainable import Trainable
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
    from megavis.objectives.classification import Classification
    from megavis.objectives.composition import Composition

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
        names = [module.name for module in pkgutil.iter_modules(__path__)]
        papers = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
        return (name for name in papers if _has_keys(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _has_keys(name: str) -> bool:
    try:
        _config_type(name)
    except KeyError:  # keys that several papers share
        return False
    return True


def _config_type(name: str) -> type[ObjectiveConfig]:
    """Return the config class whose `name` this is; raises KeyError where there is none."""
    module = f"{__name__}.{name}{_SUFFIX}"
    if not name.isidentifier() or find_spec(module) is None:
        raise KeyError(name)
    classes = [v for v in vars(importlib.import_module(module)).values() if isinstance(v, type)]
    for each in classes:
        if issubclass(each, ObjectiveConfig) and each.model_fields["name"].default == name:
            return each
    raise KeyError(name)


def _objective_type(name: str) -> type[Trainable]:
    """Return the class that takes such configs; raises KeyError where there is no such paper."""
    keys = _config_type(name)
    for value in vars(importlib.import_module(f"{__name__}.{name}")).values():
        if isinstance(value, type) and getattr(value, "config_type", None) is keys:
            return value
    raise KeyError(name)


OBJECTIVES: Mapping[str, type[Trainable]] = _Papers(_objective_type)
"""The class of each paper by name."""
