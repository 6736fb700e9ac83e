"""Options of `megavis sample` that belong to a paper's density, schedule or search."""

from __future__ import annotations

import argparse
from typing import Any

_OPTIONS: dict[str, tuple[type, str]] = {
    "temperature": (
        float,
        "spread of what is drawn: 1 the model's own, 0 the likeliest; divides logits, multiplies"
        " deviations and noise",
    ),
    "top_k": (int, "choose among so many ids"),
    "top_p": (float, "choose among ids of so much probability"),
    "sampling_steps": (int, "from noise to a patch; default: the config's"),
    "probability": (float, "multiplies the logits of a mixture's components"),
    "guidance": (float, "w of density-based classifier-free guidance; default: 0"),
    "beams": (int, "sequences that beam search keeps of each image"),
    "fans": (int, "candidates for each of them at every token"),
    "rounds": (int, "in which masked models draw; default: 16"),
    "choice_temperature": (float, "chance in what masked models keep; default: 35"),
    "groups": (int, "in which hidden tokens are predicted"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them; one that does not apply to a run is refused when its paper is known."""
    group = parser.add_argument_group(
        "options of a paper", "One that does not apply to the run is refused by name."
    )
    for name, (kind, text) in _OPTIONS.items():
        group.add_argument(spelled(name), type=kind, help=text)


def chosen_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return those that were given, by name."""
    values = {name: getattr(args, name) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def spelled(name: str) -> str:
    """Return how an option is written on the command line."""
    return f"--{name.replace('_', '-')}"
