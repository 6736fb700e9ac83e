"""Find papers by the names of their folders in `megavis/papers`.

A paper is a folder with its keys, `config.py`, and its model, `paper.py`. The first imports no
torch, so mistakes in a config are reported immediately; the second is imported when the model is
built. Adding a paper only adds files, and a run imports no other paper. A folder may hold variants
of its paper: in `givt/`, `maskgit_config.py` and `maskgit.py` are `givt_maskgit`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from megavis.config.schema import ObjectiveConfig

_Found = TypeVar("_Found")
_ROOMS = "megavis.papers"
_SUFFIX = "_config"


def rooms() -> Iterator[str]:
    """Yield the names of the papers' folders."""
    modules = pkgutil.iter_modules(importlib.import_module(_ROOMS).__path__)
    return (module.name for module in modules if module.ispkg)


def room_module(room: str, name: str) -> str | None:
    """Return the full name of a module in a paper's folder; None if there is none."""
    full = f"{_ROOMS}.{room}.{name}"
    return full if find_spec(full) else None


class Papers(Mapping[str, _Found]):
    """Lazy mapping from the name of each paper to the result of `find`."""

    def __init__(self, find: Callable[[str], _Found]) -> None:
        self._find = find

    def __getitem__(self, name: str) -> _Found:
        """Return the result of `find`; raises KeyError if there is no such paper."""
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        for room in rooms():
            folder = importlib.import_module(f"{_ROOMS}.{room}")
            for module in pkgutil.iter_modules(folder.__path__):
                if module.name == "config":
                    yield room
                elif module.name.endswith(_SUFFIX):
                    yield f"{room}_{module.name.removesuffix(_SUFFIX)}"

    def __len__(self) -> int:
        return sum(1 for _ in self)


def paper_config(name: str) -> type[ObjectiveConfig]:
    """Return the config class with this `name`; raises KeyError if there is none."""
    # Imported here: declarations of figures are read without the schema.
    from megavis.config.schema import ObjectiveConfig

    keys, _ = _modules(name)
    for each in vars(importlib.import_module(keys)).values():
        is_config = isinstance(each, type) and issubclass(each, ObjectiveConfig)
        if is_config and each.model_fields["name"].default == name:
            found: type[ObjectiveConfig] = each
            return found
    raise KeyError(name)


def paper_class(name: str) -> Any:
    """Return the model class for such configs; raises KeyError if there is no such paper."""
    keys, (_, model) = paper_config(name), _modules(name)
    for value in vars(importlib.import_module(model)).values():
        if isinstance(value, type) and getattr(value, "config_type", None) is keys:
            return value
    raise KeyError(name)


PAPER_CONFIGS: Mapping[str, type[ObjectiveConfig]] = Papers(paper_config)
"""The config class of each paper by name."""


def _modules(name: str) -> tuple[str, str]:
    """Return the modules of a paper's keys and model; raises KeyError if there are none."""
    parts = name.split("_")
    for end in range(len(parts), 0, -1):
        room, variant = "_".join(parts[:end]), "_".join(parts[end:])
        keys, model = (variant + _SUFFIX, variant) if variant else ("config", "paper")
        folder = f"{_ROOMS}.{room}"
        if room.isidentifier() and find_spec(folder) and find_spec(f"{folder}.{keys}"):
            return f"{folder}.{keys}", f"{folder}.{model}"
    raise KeyError(name)
