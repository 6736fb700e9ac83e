"""Which options of `megavis sample` apply to which runs, and with which other options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from megavis.commands.options import refuse_options

if TYPE_CHECKING:
    from megavis.objectives.trainable import Trainable

_IMAGES = ("--images",)
_DRAWS = ("--seed", "--npz")
_COMPLETES = ("--prefix", "--completions", *_IMAGES, *_DRAWS)
_NOISE = ("--temperature", "--sampling-steps")
_IDS = ("--temperature", "--top-k", "--top-p", *_COMPLETES)
_DENSITY = ("--scale", "--probability", "--guidance", "--seed")
_SEARCH = ("--beams", "--fans")
_ROUNDS = ("--rounds", "--choice-temperature", "--show-rounds")
_CLASSES = ("--classes", "--per-class", "--then-classes")
_MOMENTS = ("--moments", *_IMAGES)
_ALL = dict.fromkeys(
    (*_IDS, *_NOISE, *_DENSITY, *_SEARCH, *_ROUNDS, *_CLASSES, *_MOMENTS, "--num-images")
)


def check_options(objective: Trainable, args: argparse.Namespace) -> None:
    """Refuse what would be ignored.

    Raises:
        UserError: naming the options that do not apply to this run, or not together.
    """
    legal = (*_legal_for(objective), "--num-images")
    known = f"which takes {', '.join(dict.fromkeys(legal))}"
    others = [option for option in _ALL if option not in legal]
    refuse_options(args, others, f"to this run of {objective.config.objective.name}, {known}")
    _check_together(args, legal)


def refuse_noise_options(objective: Trainable, args: argparse.Namespace) -> None:
    """Refuse options of the way from noise to a patch where a run has none; raises UserError."""
    if not draws_from_noise(objective):
        name = objective.config.objective.name
        refuse_options(args, _NOISE, f"to this run of {name}, which draws without noise")


def draws_from_noise(objective: Trainable) -> bool:
    """Return whether a run that draws patch by patch begins each with noise."""
    from megavis.objectives.darl import DARL

    return not isinstance(objective, DARL) or objective.is_diffusion


def _legal_for(objective: Trainable) -> tuple[str, ...]:
    """Return the options of a kind of run, besides those of every run."""
    from megavis.objectives.base import PatchByPatch, TokenByToken
    from megavis.objectives.real_tokens import OneByOne, ReadsImages, Uncovers

    if isinstance(objective, ReadsImages):
        return (*_DENSITY, *_SEARCH, *_IMAGES, "--completions")
    if isinstance(objective, OneByOne):
        return (*_DENSITY, *_SEARCH, *_CLASSES, *_MOMENTS, *_DRAWS)
    if isinstance(objective, Uncovers):
        return (*_DENSITY, *_ROUNDS, *_CLASSES, *_MOMENTS, *_DRAWS)
    if isinstance(objective, PatchByPatch):
        return (*_NOISE, *_COMPLETES) if draws_from_noise(objective) else _COMPLETES
    return _IDS if isinstance(objective, TokenByToken) else _IMAGES


def _check_together(args: argparse.Namespace, legal: Iterable[str]) -> None:
    others: tuple[str, ...]
    if args.npz is not None:
        others = ("--out", "--completions", *_IMAGES, *_CLASSES, "--moments", "--show-rounds")
        refuse_options(args, others, "to --npz, which holds --num-images images, classes in turns")
    if "--prefix" in legal and not args.prefix:
        refuse_options(args, ("--completions", *_IMAGES), "without --prefix")
    if args.moments:
        others = ("--out", *_CLASSES, "--show-rounds")
        refuse_options(args, others, "to --moments, which draws no picture")
    elif "--moments" in legal:
        refuse_options(args, _IMAGES, "without --moments")
    if args.show_rounds:
        refuse_options(args, ("--then-classes",), "to --show-rounds")
    if args.classes is None:
        refuse_options(args, ("--per-class", "--then-classes"), "without --classes")
    else:
        refuse_options(args, ("--num-images",), "to --classes; --per-class says how many of each")
