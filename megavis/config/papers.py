"""Find papers by the names of their folders in `megavis/papers`.

A paper is a folder whose `config.py` declares its keys and translates them into the words of the
grammar. This imports no torch, so mistakes in a config are reported immediately. Models that words
cannot express, such as autoencoders, are in `paper.py`, which is imported when the model is built.
Adding a paper only adds files, and a run imports no other paper. A folder may hold variants of its
paper, whose names begin with the folder's: the keys of `givt_maskgit` are a class in
`givt/config.py`. The model of `vae_label_maps` has its own file, `vae/label_maps.py`. `compose` is
the grammar itself.

The `__init__.py` of a folder declares the paper's figures and forms of released weights, in the
tuples `FIGURES` and `IMPORTS`, also without torch; their code is imported when it is needed.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megavis.config.arguments import positive
from megavis.config.errors import UserError

if TYPE_CHECKING:
    from megavis.config.schema import ObjectiveConfig


_Found = TypeVar("_Found")
_ROOMS = "megavis.papers"
_MODEL = "megavis.composition.model"
_NAMELESS = {"compose": "megavis.grammar.compose"}


def rooms() -> Iterator[str]:
    """Yield the names of the papers' folders, which have a `config.py`."""
    places = importlib.import_module(_ROOMS).__path__
    names = [module.name for module in pkgutil.iter_modules(places) if module.ispkg]
    # By the file, since `find_spec` would import the folder.
    for name in names:
        if any(Path(place, name, "config.py").exists() for place in places):
            yield name


def declared(name: str) -> Iterator[Any]:
    """Yield the entries of the tuples of this name in the `__init__.py` of papers' folders."""
    for room in rooms():
        yield from getattr(importlib.import_module(f"{_ROOMS}.{room}"), name, ())


class Papers(Mapping[str, _Found]):
    """Lazy mapping from the name of each paper to the result of `find`."""

    def __init__(self, find: Callable[[str], _Found]) -> None:
        self._find = find

    def __getitem__(self, name: str) -> _Found:
        """Return the result of `find`; raises KeyError if there is no such paper."""
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for room in rooms() for name in _configs_of(room))
        yield from _NAMELESS

    def __len__(self) -> int:
        return sum(1 for _ in self)


def paper_config(name: str) -> type[ObjectiveConfig]:
    """Return the config class with this `name`; raises KeyError if there is none."""
    return (_configs(_NAMELESS[name]) if name in _NAMELESS else _configs_of(_room(name)))[name]


def missing_part(name: str) -> str | None:
    """Return what a folder lacks to be the paper of this name, which is none; None without one."""
    for place in importlib.import_module(_ROOMS).__path__:
        folder = Path(place, name)
        if not name.isidentifier() or not folder.is_dir():
            continue
        for file in ("__init__.py", "config.py"):
            if not (folder / file).exists():
                return f"{folder} has no {file}"
        return f"{folder / 'config.py'} has no config class with name: Literal[{name!r}] = {name!r}"
    return None


def paper_class(name: str) -> Any:
    """Return the model class for such configs; see `own_model`."""
    return own_model(name) or importlib.import_module(_MODEL).Model


def own_model(name: str) -> Any:
    """Return the model class that a paper's folder declares; None if it is its words' model.

    Raises:
        KeyError: there is no such paper.
        UserError: the folder declares a model for no config.
    """
    keys = paper_config(name)
    if name in _NAMELESS:
        return None
    room = _room(name)
    for file in (name.removeprefix(room).removeprefix("_"), "paper"):
        module = f"{_ROOMS}.{room}.{file}"
        if not file or find_spec(module) is None:
            continue
        classes = [
            value
            for value in vars(importlib.import_module(module)).values()
            if isinstance(value, type) and value.__module__ == module
        ]
        # Models inherit the attribute; other classes have none.
        models = {value.config_type: value for value in classes if hasattr(value, "config_type")}
        if keys in models:
            return models[keys]
        if models and not any(each.__module__ == keys.__module__ for each in models):
            names = ", ".join(each.__name__ for each in models.values())
            raise UserError(
                f"{module} has a model, {names}, that does not say for which keys: set"
                f" config_type = {keys.__name__}"
            )
    return None


PAPER_CONFIGS: Mapping[str, type[ObjectiveConfig]] = Papers(paper_config)
"""The config class of each paper by name."""


def _room(name: str) -> str:
    """Return the folder of a paper; raises KeyError if there is none."""
    found = [room for room in rooms() if f"{name}_".startswith(f"{room}_")]
    if not found:
        raise KeyError(name)
    return max(found, key=len)


def _configs_of(room: str) -> dict[str, type[ObjectiveConfig]]:
    """Return the config classes of a folder, by name.

    Raises:
        UserError: a name does not begin with the folder's, or another folder's is longer.
    """
    configs = _configs(f"{_ROOMS}.{room}.config")
    for name, keys in configs.items():
        if not f"{name}_".startswith(f"{room}_"):
            text = f"must be {room!r}, as its folder, or begin with '{room}_'"
        elif _room(name) != room:
            text = f"belongs to another folder, {_room(name)}"
        else:
            continue
        raise UserError(f"{inspect.getsourcefile(keys)}: name {name!r} of {keys.__name__} {text}")
    return configs


def _configs(module_name: str) -> dict[str, type[ObjectiveConfig]]:
    """Return the config classes that a module declares, by name.

    Raises UserError if two have the same.
    """
    # Imported here: declarations of figures are read without the schema.
    from megavis.config.schema import ObjectiveConfig

    module = importlib.import_module(module_name)
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    # A module also has the classes that it imports, which may be another paper's.
    own = [each for each in classes if each.__module__ == module.__name__]
    papers = [each for each in own if issubclass(each, ObjectiveConfig)]
    found: dict[str, type[ObjectiveConfig]] = {}
    for each in papers:
        name = each.model_fields["name"].default
        # A name may be inherited from another paper's class, by a base of several.
        if not isinstance(name, str) or "name" not in inspect.get_annotations(each):
            continue
        if (other := found.setdefault(name, each)) is not each:
            raise UserError(
                f"{module.__file__}: {other.__name__} and {each.__name__} have the same name,"
                f" {name!r}; change one"
            )
    return found


@dataclass(frozen=True)
class FigureSpec:
    """A figure of a run and of held-out images.

    Attributes:
        name: name, as users type it.
        help: one line on what it shows.
        description: what is computed and plotted.
        num_images: default of `--num-images`.
        plot: plotting function as "module:function"; takes `FigureInput` and the options, returns
            a `RenderedFigure` (`megavis.evaluation.figures`).
        applies: function of the same module that takes the run's objective; returns whether it has
            such a figure.
        example: arguments after `megavis figure NAME`.
        add_options: adds its own options.
        reads_classes: whether it gives the model the classes of the images.
        decodes: whether it shows tokens as images.
    """

    name: str
    help: str
    description: str
    num_images: int
    plot: str
    applies: str = "applies"
    example: str = "runs/demo"
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    reads_classes: bool = False
    decodes: bool = False


def paper_figures() -> Iterator[FigureSpec]:
    """Return the figures declared by papers."""
    return declared("FIGURES")


@dataclass(frozen=True)
class ImportOption:
    """An option of `megavis import`, as for argparse; forms may share one declaration."""

    name: str
    help: str
    type: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    default: Any = None
    metavar: str | None = None


@dataclass(frozen=True)
class ImportSpec:
    """A form of released weights.

    Attributes:
        name: name, as users type it.
        help: what is read, as a sentence after the name.
        read: function as "module:function"; takes the command's arguments, and returns a
            `Released` (`megavis.weights.released`).
        options: options besides the source and the run folder.
        model_types: values of `model_type` in the `config.json` of Hub folders that are read this
            way; `timm` for a timm folder, which names an architecture instead.
    """

    name: str
    help: str
    read: str
    options: tuple[ImportOption, ...] = ()
    model_types: tuple[str, ...] = ()


IMAGE_SIZE = ImportOption(
    "--image-size", "side of the images in pixels; default: 256", type=positive, default=256
)
HEADS = ImportOption(
    "--heads", "attention heads; default: width / 64, or as released for this width", type=positive
)
TOKENIZER = ImportOption(
    "--tokenizer",
    "run folder of the VAE of the latents, or of the VQGAN of the ids",
    type=Path,
)
PALETTE = ImportOption(
    "--palette", "kmeans_centers.npy; default: the folder's own", type=Path, metavar="FILE"
)


def paper_imports() -> Iterator[ImportSpec]:
    """Return the forms declared by papers."""
    return declared("IMPORTS")
