"""`compose`: a model written directly in the words of the grammar."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from megavis.config.errors import UserError
from megavis.config.papers import own_model
from megavis.config.schema import RunConfig
from megavis.config.section import PositionKind
from megavis.grammar.grammar import Grammar, Words
from megavis.grammar.paper import PaperConfig


class ComposeConfig(Words, PaperConfig):
    """Config keys of a composition: each word is a section, whose `kind` determines its keys."""

    takes_frames: ClassVar[bool] = True

    name: Literal["compose"] = "compose"

    def own_name(self, key: str) -> str:
        """Return the key itself: a composition has the grammar's own keys."""
        return key

    def grammar(self, run: RunConfig) -> Grammar:
        """Return the words; positions are learned by default, or absent if they are predicted."""
        default: PositionKind = "none" if self.asks.kind == "in_context" else "learned"
        return Grammar(**_words(self), positions=run.model.positions or default)


def _words(section: Words) -> dict[str, Any]:
    return {name: getattr(section, name) for name in Words.model_fields}


def written_out(run: RunConfig) -> RunConfig:
    """Return the same run with its paper written in words, as a composition.

    Raises:
        UserError: the run is an autoencoder's, or a paper's with a model class of its own, which no
            words describe.
    """
    name = run.objective.name
    if not isinstance(run.objective, PaperConfig):
        raise UserError(f"{name} is an autoencoder, and the grammar has no words for one")
    if (own := own_model(name)) is not None:
        raise UserError(f"{name} has a model of its own, {own.__module__}, which no words describe")
    grammar = run.objective.grammar(run)
    model = run.model.model_copy(update={"positions": grammar.positions})
    return run.model_copy(update={"objective": ComposeConfig(**_words(grammar)), "model": model})


def in_same_words(first: RunConfig, second: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Return two runs, both written in words if one is a paper's and the other a composition."""
    names = [first.objective.name, second.objective.name]
    papers = [isinstance(each.objective, PaperConfig) for each in (first, second)]
    if names[0] == names[1] or not all(papers) or any(map(own_model, names)):
        return first, second
    return written_out(first), written_out(second)
