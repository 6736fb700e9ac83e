"""Labelled data sets as shards, one folder a split, listed in words or in a YAML file.

cifar10: {path: shards/cifar10}
pets:
  path: shards/pets
  splits: {train: trainval, test: test, validation: null}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megavis.config.errors import UserError
from megavis.config.schema import ConfigIssue
from megavis.config.section import Section
from megavis.config.yaml_tree import ConfigSource, read_tree


@dataclass(frozen=True)
class LabelledFolders:
    """The shard folders of one data set.

    Attributes:
        train: classifiers are fitted on it.
        test: judges.
        validation: held out to choose by; None: a part of `train` is.
    """

    train: str
    test: str
    validation: str | None


class _Splits(Section):
    train: str = "train"
    validation: str | None = "validation"
    test: str = "test"


class _Entry(Section):
    path: str
    splits: _Splits = _Splits()

    @property
    def folders(self) -> LabelledFolders:
        splits, held_out = self.splits, None
        if splits.validation is not None:
            held_out = f"{self.path}/{splits.validation}"
            # That of the default name need not be there; one that was asked for must.
            if "validation" not in splits.model_fields_set and not Path(held_out).is_dir():
                held_out = None
        return LabelledFolders(
            f"{self.path}/{splits.train}", f"{self.path}/{splits.test}", held_out
        )


def read_data_sets(text: str) -> dict[str, LabelledFolders]:
    """Read `name:folder` pairs with commas between them, or the name of a YAML file.

    Raises:
        UserError: the text is neither, names one data set twice, or the file has other keys than
            `path` and `splits` for each.
    """
    if text.endswith((".yaml", ".yml")):
        return _read_file(Path(text))
    pairs = [part.partition(":")[::2] for part in text.split(",")]
    if not all(name and folder for name, folder in pairs) or len(dict(pairs)) < len(pairs):
        raise UserError(
            f"--data-sets {text}: this is no YAML file, nor a list of different names as"
            " cifar10:shards/cifar10,pets:shards/pets"
        )
    return {name: _Entry(path=folder).folders for name, folder in pairs}


def _read_file(path: Path) -> dict[str, LabelledFolders]:
    source = ConfigSource(str(path))
    found: dict[str, LabelledFolders] = {}
    complaints: list[ConfigIssue] = []
    for name, keys in read_tree(path, source).items():
        try:
            found[str(name)] = _Entry.model_validate(keys).folders
        except ValidationError as error:
            complaints += _explain(str(name), error)
    if complaints:
        raise source.error(complaints)
    if not found:
        raise UserError(f"{path} names no data set; one is, for example, cifar10: {{path: FOLDER}}")
    return found


def _explain(name: str, error: ValidationError) -> Iterator[ConfigIssue]:
    for each in error.errors():
        sections = [str(part) for part in each["loc"]]
        known = ", ".join((_Splits if "splits" in sections[:-1] else _Entry).model_fields)
        text = {
            "extra_forbidden": f"unknown key; known here: {known}",
            "missing": "is missing; it names the folder of the splits",
            "model_type": f"must hold keys, not {each['input']!r}; known here: {known}",
        }.get(each["type"], f"must be a text, not {each['input']!r}")
        yield ".".join([name, *sections]), text
