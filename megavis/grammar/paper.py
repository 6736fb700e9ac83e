"""A paper's config section: its own keys, and their translation into the words of the grammar."""

from __future__ import annotations

import re
import sys
import traceback
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError

from megavis.config.errors import UserError
from megavis.config.schema import ConfigIssue, ObjectiveConfig, RunConfig
from megavis.config.section import sections_in
from megavis.grammar.checks import check
from megavis.grammar.faults import Fault
from megavis.grammar.grammar import Grammar, Words

_KEY = re.compile(r"\{([a-z_.]+)\}")


@dataclass(frozen=True)
class Renamed:
    """A paper's key for a key of the grammar, and what to set it to if it does not fit."""

    key: str
    remedy: str


class PaperConfig(ObjectiveConfig):
    """Keys of a paper with Transformer blocks."""

    has_relative_positions: ClassVar[bool] = True  # the grammar is checked
    generates: ClassVar[bool] = True
    """Whether models with some keys generate images."""
    names: ClassVar[Mapping[str, str | Renamed]] = {}
    """The paper's keys for keys of the grammar with other names, such as `schedule.length`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Raise UserError if `names` has a key that the grammar or the paper lacks."""
        is_paper = isinstance(cls.model_fields["name"].default, str)
        for key, name in cls.names.items() if is_paper else ():
            own = name.key if isinstance(name, Renamed) else name
            for owner, path, what in ((Words, key, "the grammar"), (cls, own, "the paper")):
                if not _has(owner, path):
                    file = sys.modules[cls.__module__].__file__
                    raise UserError(f"{file}: names of {cls.__name__}: {what} has no key {path!r}")

    @abstractmethod
    def grammar(self, run: RunConfig) -> Grammar:
        """Return the paper in words; valid only if `own_faults` has none."""

    def own_faults(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield missing and unused keys, and those that words cannot express; none by default."""
        yield from ()

    def check(self, run: RunConfig) -> Iterator[ConfigIssue]:
        """Yield what is wrong with the paper's keys, and then with its words.

        An exception in the paper's own code is one of these, with its file and line.
        """
        try:
            own, grammar = [*self.own_faults(run)], None
            if not own and (self.takes_frames or run.data.frames is None):
                grammar = self.grammar(run)
                if not isinstance(grammar, Grammar):
                    name = type(grammar).__name__
                    raise TypeError(f"{type(self).__name__}.grammar returns {name}, not Grammar")
        except UserError:
            raise
        except ValidationError as error:
            yield from self._word_errors(error)
            return
        except Exception as error:
            yield "objective", f"{self._place(error)}{type(error).__name__}: {error}"
            return
        yield from own
        # Two words may have one key, whose fault is then said once.
        yield from dict.fromkeys(self._faults(grammar, run) if grammar is not None else ())

    def _faults(self, grammar: Grammar, run: RunConfig) -> Iterator[ConfigIssue]:
        for fault in check(grammar, run):
            text = f"{fault.text}; {self._remedy(fault)}"
            yield self.key(fault.key), self.in_own_keys(text)

    def _word_errors(self, error: ValidationError) -> Iterator[ConfigIssue]:
        """Yield that a word has another range than the paper's key, or is misspelt."""
        for each in error.errors():
            key = ".".join(map(str, each["loc"]))
            text = f"{each['msg'][0].lower()}{each['msg'][1:]}, not {each['input']!r}"
            text = f"{text} (key {key} of the word {error.title})"
            if _has(type(self), key):
                yield f"objective.{key}", text
            else:
                yield "objective", f"{self._place(error)}{text}"

    def _place(self, error: Exception) -> str:
        """Return file and line of the paper's code that an exception left last, for a message."""
        modules = [sys.modules[each.__module__] for each in type(self).__mro__]
        files = {each.__file__ for each in modules if each.__name__.startswith("megavis.")}
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if each.filename in files - {__file__}]
        if not own:
            return f"{sys.modules[type(self).__module__].__file__}: "
        return f"{own[-1].filename}:{own[-1].lineno}: "

    def _remedy(self, fault: Fault) -> str:
        name = self.names.get(fault.key)
        remedy = name.remedy if isinstance(name, Renamed) else fault.remedy
        changes = " or ".join(self.key(key) for key in fault.changes if self.own_name(key))
        return f"change {changes}, or {remedy}" if changes else remedy

    def key(self, key: str) -> str:
        """Return the config key for a key of the grammar; keys of other sections are unchanged."""
        if key.partition(".")[0] not in Words.model_fields:
            return key
        name = self.own_name(key) or key
        return f"objective.{name.key if isinstance(name, Renamed) else name}"

    def own_name(self, key: str) -> str | Renamed | None:
        """Return the paper's name of a key of the grammar; None if it has no such key."""
        if key in self.names:
            return self.names[key]
        parts = key.split(".")  # `schedule.order` is the paper's `order`, if it has one.
        paths = (".".join(parts[start:]) for start in range(len(parts)))
        return next((path for path in paths if _has(type(self), path)), None)

    def in_own_keys(self, text: str) -> str:
        """Replace the grammar's keys in braces by config keys."""
        return _KEY.sub(lambda found: self.key(found[1]), text)

    def null_label_key(self, run: RunConfig) -> str | None:
        """See `ObjectiveConfig`."""
        key = self.grammar(run).null_label_key
        return None if key is None else self.key(key)

    def cannot_generate(self, run: RunConfig) -> str | None:
        """See `ObjectiveConfig`."""
        if not self.generates:
            return super().cannot_generate(run)
        fault = self.grammar(run).cannot_generate
        if fault is None:
            return None
        text, remedy = fault.text, self._remedy(fault)
        if remedy:  # Here no key precedes the sentence.
            text += f"; to generate, {remedy.replace('set it', f'set {self.key(fault.key)}', 1)}"
        return self.in_own_keys(text)

    def num_further_blocks(self, run: RunConfig) -> int:
        """See `ObjectiveConfig`."""
        return self.grammar(run).num_further_blocks

    def warning(self, run: RunConfig) -> str | None:
        """Return the warning to print before training a model that generates no images."""
        text = self.cannot_generate(run) if self.generates else None
        return text and f"this run will generate no images: {text}"


def _has(section: type[BaseModel], path: str) -> bool:
    """Return whether a section, of any kind, has a key, or a section with the rest of its path."""
    name, _, rest = path.partition(".")
    if name not in section.model_fields or not rest:
        return name in section.model_fields
    return any(_has(inner, rest) for inner in sections_in(section.model_fields[name].annotation))
