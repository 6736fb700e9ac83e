"""From a YAML file and `key=value` words to a checked `RunConfig`.

Every error names the file, the line and the key, and says what would be right. All errors of a
config are raised as one `UserError`. An export contains its tokenizers, and its config names their
run folders relative to its own; `load_run_config` resolves them.
"""

from __future__ import annotations

import difflib
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megavis.config.arguments import RUN_NAME_RULE
from megavis.config.checks import check_config
from megavis.config.errors import UserError
from megavis.config.papers import PAPER_CONFIGS, missing_part
from megavis.config.schema import ConfigIssue, ObjectiveConfig, RunConfig
from megavis.config.section import sections_in
from megavis.config.shorthand import (
    CountImages,
    Shorthand,
    shorthand_keys,
    take_shorthand,
    write_out_epochs,
)
from megavis.config.yaml_tree import (
    ConfigSource,
    apply_override,
    dump_tree,
    expand_home,
    leaves,
    read_tree,
)


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config and the locations of its keys."""

    config: RunConfig
    source: ConfigSource


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, count_images: CountImages | None = None
) -> LoadedConfig:
    """Read a YAML file, apply `key=value` words, check everything.

    Args:
        path: the YAML file.
        overrides: words such as `training.steps=100`; the value is read as YAML.
        count_images: counts images in shards, for durations in epochs; without it the config needs
            `data.num_images`.

    Raises:
        UserError: every mistake with file, line, key and what would be right.
    """
    source = ConfigSource(str(path))
    tree = read_tree(Path(path), source)
    for word in overrides:
        apply_override(tree, word, source)
    config = _validate(expand_home(tree), source, count_images)
    complaints = list(check_config(config))
    if complaints:
        raise source.error(complaints)
    return LoadedConfig(config, source)


def _validate(
    tree: dict[str, Any], source: ConfigSource, count_images: CountImages | None
) -> RunConfig:
    names = SchemaNames(tree)
    if names.objective is None:
        given = f", not {reprlib.repr(names.paper)}" if names.paper is not None else ""
        if (missing := missing_part(str(names.paper))) is not None:
            raise source.error([("objective.name", f"{names.paper} is not a paper yet: {missing}")])
        known = ", ".join(sorted(PAPER_CONFIGS))
        text = (
            f"must say which paper: one of {known}{given}{did_you_mean(names.paper, PAPER_CONFIGS)}"
        )
        raise source.error([("objective.name", text)])
    null = "YAML spells it null, not None"
    complaints: list[ConfigIssue] = [(key, null) for key, value in leaves(tree) if value == "None"]
    try:
        shorthand = Shorthand.model_validate(take_shorthand(tree))
        complaints += write_out_epochs(tree, shorthand, count_images)
    except ValidationError as error:
        complaints += names.explain(error.errors())
    except UserError as error:
        raise source.located(error) from None
    if complaints:
        # Otherwise the keys that they expand to would be reported as missing.
        raise source.error(complaints)
    # Validate the objective first, with its paper's class, so its errors keep their keys.
    try:
        tree["objective"] = names.objective.model_validate(tree["objective"])
    except ValidationError as error:
        complaints += names.explain(error.errors(), ["objective"])
        # A placeholder, so that mistakes in the other sections are reported too.
        tree["objective"] = ObjectiveConfig(name="")
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        complaints += names.explain(error.errors())
    if complaints:
        raise source.error(complaints)
    return config


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as YAML that `load_config` reads back to the same config."""
    return dump_tree(config.model_dump(mode="json"))


class SchemaNames:
    """The keys of each section, for suggesting the nearest one on a typo."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        # A copy, since the objective will be replaced by the checked one.
        self.tree, section = dict(tree), tree.get("objective")
        self.paper = section.get("name") if isinstance(section, dict) else None
        self.objective = PAPER_CONFIGS.get(str(self.paper))

    def explain(self, errors: Iterable[Any], prefix: Sequence[str] = ()) -> list[ConfigIssue]:
        """Turn pydantic's errors into keys and sentences.

        A misspelt required key is both unknown and missing; only the first is reported. A key that
        takes several types has an error of each, which become one sentence.
        """
        placed: dict[tuple[str, ...], list[Any]] = {}
        for error in errors:
            place = (*prefix, *self._keys_of(error, prefix))
            placed.setdefault(place, []).append(error)
        unknown = [place for place, (error, *_) in placed.items() if _is_unknown(error)]
        meant = {self._nearest([*place]) for place in unknown}
        return [
            self._explain_one([*place], alike)
            for place, alike in placed.items()
            if alike[0]["type"] != "missing" or ".".join(place) not in meant
        ]

    def _explain_one(self, location: list[str], errors: Sequence[Any]) -> ConfigIssue:
        error, key = errors[0], ".".join(location) or "config"
        if _is_unknown(error):
            return key, self._unknown(location)
        if error["type"] == "missing":
            return key, "is missing and has no default"
        if error["type"].startswith("union_tag"):
            return f"{key}.kind", _wrong_kind(error)
        given = reprlib.repr(error.get("input"))
        if error["type"] == "string_pattern_mismatch":
            # Names of runs are the only keys with a pattern.
            return key, f"{RUN_NAME_RULE}; {given} does not"
        if error["type"] in ("model_type", "model_attributes_type"):
            return key, f"must hold keys, not {given}; known here: {self._listed(location)}"
        texts = [str(each["msg"]).removeprefix("Value error, ") for each in errors]
        texts[1:] = [text.removeprefix("Input should be ") for text in texts[1:]]
        text = ", or ".join(texts).replace("a valid tuple", "a list, such as [a, b]")
        words = [word for each in errors for word in _legal_words(each)]
        meant = did_you_mean(error.get("input"), words)
        if len(errors) == 1:
            meant = meant or _in_yaml(error)
        return key, f"{text[0].lower()}{text[1:]}, not {given}{meant}"

    def _unknown(self, location: list[str]) -> str:
        sections = location[:-1]
        meant = self._nearest(location)
        if meant is None:
            return f"unknown key; known here: {self._listed(sections)}"
        in_place = meant.removeprefix("".join(f"{section}." for section in sections))
        return f"unknown key; did you mean '{in_place}'?"

    def _nearest(self, location: list[str]) -> str | None:
        """Return the intended key: of the same name elsewhere, or similar here.

        Sections of the config, and then those that share the first key, come before others.
        """
        *sections, last = location
        found = [
            (is_given, path[0] in sections[:1], ".".join((*path, last)))
            for path, keys, is_given in self._sections(RunConfig, self.tree, ())
            if path
            and last in keys
            and last != "kind"
            # A word that is not given may be one of many.
            and (is_given or len(path) == 1 or [*path[: len(sections)]] == sections)
        ]
        if found:
            return max(found, key=lambda each: each[:2])[2]
        near = difflib.get_close_matches(last, self._keys(sections), n=1, cutoff=0.5)
        return ".".join([*sections, *near]) if near else None

    def _sections(
        self, model: type[BaseModel], tree: Any, path: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], Sequence[str], bool]]:
        """Yield place and keys of each section below one, and whether the config has it."""
        is_given = isinstance(tree, Mapping)
        yield path, [*model.model_fields, *shorthand_keys(".".join(path))], is_given
        for name in model.model_fields:
            value = tree.get(name) if is_given else None
            if value is None or isinstance(value, Mapping):
                for inner in self._models(model, name, value):
                    yield from self._sections(inner, value, (*path, name))

    def _keys_of(self, error: Mapping[str, Any], prefix: Sequence[str]) -> Iterator[str]:
        """Yield the keys of an error's location, without the labels of unions."""
        models: list[type[BaseModel]] = [RunConfig]
        if prefix and self.objective is not None:
            models = [self.objective]
        location, is_union = error["loc"], False
        for place, part in enumerate(location, start=1):
            owners = [model for model in models if part in model.model_fields]
            if isinstance(part, str) and is_union and not owners:
                if _is_unknown(error) and place == len(location):
                    yield part
                models = _of_kind(models, part) or models
                continue
            yield str(part)
            if isinstance(part, str):
                fields = [model.model_fields[part] for model in owners]
                is_union = any(_is_union(field.annotation) for field in fields)
                models = [each for field in fields for each in sections_in(field.annotation)]

    def _listed(self, sections: list[str]) -> str:
        return ", ".join(self._keys(sections))

    def _keys(self, sections: list[str]) -> list[str]:
        """Return the keys of a section; of several kinds, those that all have."""
        models: list[type[BaseModel]] = [RunConfig]
        tree: Any = self.tree
        for section in sections:
            tree = tree.get(section) if isinstance(tree, Mapping) else None
            if section.isdigit():  # an index into a list, whose entries the model describes
                continue
            models = self._models(models[0], section, tree)
            if not models:
                return []
        first, *others = models
        common = [key for key in first.model_fields if all(key in m.model_fields for m in others)]
        return [*common, *shorthand_keys(".".join(sections))]

    def _models(self, model: type[BaseModel], section: str, tree: Any) -> list[type[BaseModel]]:
        """Return the sections that may stand under a key; of several, the one of the kind given."""
        if model is RunConfig and section == "objective":
            return [] if self.objective is None else [self.objective]
        field = model.model_fields.get(section)
        found = sections_in(field.annotation) if field else []
        kind = tree.get("kind") if isinstance(tree, Mapping) else None
        return _of_kind(found, kind) or found


def _is_unknown(error: Mapping[str, Any]) -> bool:
    return bool(error["type"] == "extra_forbidden")


# Of precisions, in the words of torch and of other codebases.
_SYNONYMS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp32": "float32"}


def did_you_mean(given: Any, legal: Iterable[str]) -> str:
    """Suggest the nearest legal word; empty if none is similar."""
    if not isinstance(given, str):
        return ""
    word = _SYNONYMS.get(given.lower(), given.lower())
    near = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def _in_yaml(error: Mapping[str, Any]) -> str:
    """Suggest the spelling of YAML 1.2, if the wrong value is a word of YAML 1.1."""
    given = error["input"]
    if error["type"] == "string_type" and isinstance(given, int | float):
        return "; write it in quotes to keep it as text"
    if error["type"] == "bool_type" and str(given).lower() in {"yes", "no", "on", "off", "y", "n"}:
        return f"; write {'true' if str(given).lower() in {'yes', 'on', 'y'} else 'false'}"
    if error["type"] in ("int_type", "float_type") and isinstance(given, str) and "_" in given:
        return "; write it without '_'"
    return ""


def _wrong_kind(error: Mapping[str, Any]) -> str:
    """Return the error for a section's kind."""
    given = error["input"].get("kind") if isinstance(error["input"], Mapping) else error["input"]
    kinds = re.findall("'([^']*)'", error["ctx"].get("expected_tags", ""))
    said = f"must be one of {', '.join(kinds)}" if kinds else "is missing and has no default"
    return said if given is None else f"{said}, not {given!r}{did_you_mean(given, kinds)}"


def _legal_words(error: Mapping[str, Any]) -> list[str]:
    """Return the legal words of a key; empty if it accepts others."""
    is_one_of = error["type"] == "literal_error"
    return re.findall("'([^']*)'", error["ctx"]["expected"]) if is_one_of else []


def _of_kind(models: Iterable[type[BaseModel]], kind: object) -> list[type[BaseModel]]:
    """Return the sections with this `kind`, which is the label of a union's member too."""
    return [
        each
        for each in models
        if "kind" in each.model_fields
        and kind in typing.get_args(each.model_fields["kind"].annotation)
    ]


def _is_union(annotation: Any) -> bool:
    """Return whether values of several types, besides null, are accepted."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [each for each in typing.get_args(annotation) if each is not type(None)]
        return len(kinds) > 1 or any(map(_is_union, kinds))
    return any(map(_is_union, typing.get_args(annotation)))


_KEY = "tokenizer"


def load_run_config(run_folder: Path) -> RunConfig:
    """Return the config of a run folder, with the paths of tokenizers inside it."""
    config = load_config(run_folder / "config.yaml").config
    inside = tokenizers_inside(config, run_folder)
    return with_tokenizers(config, {name: str(run_folder / name) for name in inside})


def tokenizers_inside(config: RunConfig, run_folder: Path) -> list[str]:
    """Return the tokenizers that a config names relative to its run folder."""
    return [path for path in exported_names(config) if (run_folder / path / "config.yaml").exists()]


def exported_names(config: RunConfig) -> dict[str, str]:
    """Return the folder of each tokenizer inside an export, by run folder."""
    # Two sections may name one tokenizer, which is then exported once.
    found = dict.fromkeys(_named(config.objective))
    return {path: f"{_KEY}_{i}" if i else _KEY for i, path in enumerate(found)}


def with_tokenizers(config: RunConfig, paths: Mapping[str, str]) -> RunConfig:
    """Return the config with other run folders of tokenizers, where `paths` has them."""
    objective = _replaced(config.objective, lambda path: paths.get(path, path))
    return config.model_copy(update={"objective": objective})


def _named(section: BaseModel) -> Iterator[str]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if key == _KEY and value is not None:
            yield value
        elif isinstance(value, BaseModel):
            yield from _named(value)


def _replaced(section: BaseModel, change: Callable[[str], str]) -> BaseModel:
    update: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if key == _KEY and value is not None:
            update[key] = change(value)
        elif isinstance(value, BaseModel):
            update[key] = _replaced(value, change)
    return section.model_copy(update=update)
