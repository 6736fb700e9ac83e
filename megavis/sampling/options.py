"""Options of generation: each belongs to the density, the schedule or the search of a paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megavis.composition.composition import Composition
from megavis.config.errors import UserError
from megavis.sampling.generate import GenerationSettings


@dataclass(frozen=True)
class Search:
    """Beam search, of schedules that draw one token after the other.

    Raises:
        UserError: a number is below 1.
    """

    beams: int = 1
    """Sequences that are kept of each image; 1 searches nothing."""
    fans: int = 1
    """Candidates that are drawn for each of them."""

    def __post_init__(self) -> None:
        if min(self.beams, self.fans) < 1:
            raise UserError("beams and fans must be at least 1")


def settings_of(
    paper: Composition,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    spell: Callable[[str], str] = str,
) -> GenerationSettings:
    """Give each option to its owner.

    Args:
        paper: what is generated.
        options: by name; those that are None are left to the paper.
        seed: decides every draw.
        spell: how an option is written where the user gave it.

    Raises:
        UserError: an option does not apply to this paper, or a value is out of range.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    density_type, schedule_type = paper.density.options_type, paper.schedule.options_type
    owners = [density_type, schedule_type]
    if paper.schedule.is_sequential:
        owners.append(Search)
    names = [field.name for owner in owners for field in fields(owner)]
    if others := [spell(name) for name in chosen if name not in names]:
        verb = "does" if len(others) == 1 else "do"
        takes = ", ".join(map(spell, names)) or "no options"
        raise UserError(
            f"{', '.join(others)} {verb} not apply to this run of {paper.config.objective.name},"
            f" which takes {takes}"
        )
    search = _take(Search, chosen)
    searches = max(search.beams, search.fans) > 1
    scored = searches or paper.schedule.needs_score
    drawing = paper.density.drawing(_take(density_type, chosen), scored=scored)
    if searches and drawing.num_lanes > 1:
        raise UserError(
            f"{spell('guidance')} draws from a density without a scale, which a search cannot"
            f" compare: leave out {spell('beams')} and {spell('fans')}"
        )
    return GenerationSettings(
        drawing, _take(schedule_type, chosen), search.beams, search.fans, seed
    )


def _take(owner: type, chosen: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(owner)}
    return owner(**{name: value for name, value in chosen.items() if name in names})
