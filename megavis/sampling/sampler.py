"""Generate images with a run of any paper, in batches distributed over the processes.

Each option of generation belongs to the model's density or schedule, or to beam search.

Legend: b images, n positions of the sequence, p given positions, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args, get_type_hints

import torch
from torch import Tensor

from megavis.composition.condition import Known
from megavis.composition.model import Model, generator_of
from megavis.composition.trainable import Trainable
from megavis.config.errors import UserError
from megavis.model.inference import Inference
from megavis.sampling.batches import Batches
from megavis.sampling.generate import GenerationSettings, generate_in_steps
from megavis.schedules.orders import gather_tokens, to_raster


class Sampler:
    """Generates images with a run and one set of options.

    Attributes:
        acceptance: statistics of guidance.

    Args:
        folder: the run folder, which may contain a palette.
        options: options of the model's density, schedule and search, by name.
        seed: draws are functions of seed and image index.
        spell: maps an option's name to how the user writes it, for messages.

    Raises:
        UserError: the model generates no images, or an option does not apply.
    """

    def __init__(
        self,
        inference: Inference,
        objective: Trainable,
        folder: Path,
        options: Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        spell: Callable[[str], str] = str,
    ) -> None:
        self.inference, self.folder, self.seed = inference, folder, seed
        self.model = generator_of(objective)
        self.settings = settings_of(self.model, options or {}, seed=seed, spell=spell)
        self.acceptance = Acceptance()

    @property
    def device(self) -> torch.device:
        """Device of the model and the tokens."""
        return self.inference.context.device

    def known(self, conditions: Mapping[str, Tensor], count: int) -> Known:
        """Return conditions as model inputs; raise UserError if they do not fit."""
        return self.model.condition.given(conditions, count, self.device)

    def tokens(self, images: Tensor, **options: Unpack[DrawOptions]) -> Tensor:
        """Generate tokens and return those after the last step; see `rounds`."""
        *_, last = self.rounds(images, **options)
        return last

    def rounds(self, images: Tensor, **options: Unpack[DrawOptions]) -> Iterator[Tensor]:
        """Generate tokens; collective over the processes that share a copy of the model.

        Yields:
            Tokens `[b, n, ...]` after each step, in the order of generation and as the model
            predicts them. Later steps may modify a yielded tensor.

        Raises:
            UserError: a condition does not fit, or the model cannot start from given tokens.
        """
        model, given, order = self.model, options.get("given"), options.get("order")
        if given is not None and not model.schedule.takes_given:
            raise UserError(
                f"runs of {model.config.objective.name} begin with all tokens hidden: none can be"
                " given"
            )
        images = images.to(self.device)
        steps = generate_in_steps(
            self.inference,
            model,
            images,
            settings=self.settings,
            order=self.order_of(images) if order is None else order,
            known=self.known(options.get("conditions") or {}, len(images)),
            given=given,
            cached=options.get("cached", True),
            static=options.get("static"),
        )
        made = Acceptance()
        for tokens, counts in steps:
            made.add(counts)
            yield tokens
        # Not from a batch that ran out of memory.
        self.acceptance.add(made.counts)

    def order_of(self, images: Tensor) -> Tensor:
        """Return the order in which images `[b]` are generated: int64 `[b or 1, n]`."""
        images = images.to(self.device)
        return self.model.schedule.order_of(images, seed=self.seed)

    def from_order(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Convert the output of `tokens` to the tokenizer's tokens in raster order."""
        raster = to_raster(tokens, order)
        return self.inference.on_first_stage(lambda layer: self.model.undo(layer, raster))

    def to_images(self, tokens: Tensor) -> Tensor:
        """Decode tokens in raster order to uint8 `[b, H, W, 3]`, or raise UserError."""
        # All at once if they fit: a decoder needs no other process.
        batches = Batches(self.inference.context, len(tokens), halves=True)
        return batches.run(lambda part: self.model.to_images(part, self.folder), tokens)

    def batches(self, size: int | None = None) -> Batches:
        """Return batches to generate in; None: as many images as fit on a GPU, 64 on a CPU."""
        return Batches.of(self.inference.context, size, is_alone=self.inference.is_alone)

    def sample(
        self,
        num_images: int,
        *,
        conditions: Mapping[str, Tensor] | None = None,
        originals: Tensor | None = None,
        num_given: int = 0,
        later: Mapping[str, Tensor] | None = None,
        first_halves: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Generate images, or complete originals.

        Collective over all processes; results depend on neither their number nor the batch size.

        Args:
            num_images: b. If there are fewer originals or rows of conditions, they are repeated.
            originals: samples to complete, in the form of the shards.
            num_given: given positions p, the first in the order.
            later: conditions for the second half of the order (GIVT, figure 19).
            first_halves: with `later`, int64 `[b]`: whose first half it has; default: its own.
            batch_size: images per batch; default: as many as fit on a GPU, 64 on a CPU.

        Returns:
            The tokenizer's tokens `[b, n, ...]` in raster order, the same on every process.

        Raises:
            UserError: a number or a condition is invalid.
            torch.OutOfMemoryError: a batch of `batch_size`, or of shared layers, does not fit.
        """
        known = dict(conditions or {})
        self._check(originals, num_images, num_given)
        tokens = None
        if originals is not None and num_given:
            tokens = self.model.given(self.model.tokens_of(originals.to(self.device)))
        if later is not None:  # Raise errors before any work is done.
            self.known(later, num_images)

        def sample(numbers: Tensor) -> Tensor:
            numbers = last = numbers.to(self.device)
            if first_halves is not None:
                numbers = _in_turn(first_halves.to(self.device), numbers)
            own = {name: _in_turn(rows, numbers) for name, rows in known.items()}
            # All completions of an original use the same order.
            order = self.order_of(numbers if tokens is None else numbers % len(tokens))
            given = None
            if tokens is not None:
                given = gather_tokens(_in_turn(tokens, numbers), order[:, :num_given])
            drawn = self.tokens(numbers, conditions=own, order=order, given=given)
            if later is not None:
                own = {name: _in_turn(rows, last) for name, rows in later.items()}
                half = drawn[:, : self.model.num_tokens // 2]
                drawn = self.tokens(last, conditions=own, order=order, given=half)
            return self.from_order(drawn, order)

        batches, counts = self.batches(batch_size), self.acceptance.counts
        batches.choose(sample, num_images)
        # Without the images that were generated to measure.
        self.acceptance.counts = counts
        return batches.distribute(sample, num_images)

    def balanced_images(self, images: Tensor) -> Tensor:
        """Generate the images with indices int64 `[b]`, with evenly distributed conditions.

        Returns:
            uint8 `[b, H, W, 3]`.

        Raises:
            UserError: the model generates only from given tokens or images.
        """
        if self.model.schedule.needs_given:
            name = self.model.config.objective.name
            raise UserError(f"runs of {name} cannot generate images without given tokens")
        images = images.to(self.device)
        conditions = self.model.condition.balanced(images)
        tokens = self.tokens(images, conditions=conditions)
        return self.to_images(self.from_order(tokens, self.order_of(images)))

    def given_part(self, count: int, num_given: int) -> Tensor:
        """Return the mask of given tokens for originals 0 to `count` - 1: bool `[count, n]`."""
        return self.given_part_of(self.order_of(torch.arange(count)), num_given).expand(count, -1)

    @staticmethod
    def given_part_of(order: Tensor, num_given: int) -> Tensor:
        """Return the raster-order mask bool `[b, n]` of the first tokens of orders `[b, n]`."""
        given = torch.arange(order.shape[1], device=order.device) < num_given
        return to_raster(given.expand(len(order), -1), order)

    def _check(self, originals: Tensor | None, num_images: int, num_given: int) -> None:
        if num_images < 1:
            raise UserError(f"the number of images must be at least 1, not {num_images}")
        if not 0 <= num_given <= self.model.num_tokens:
            raise UserError(
                f"the number of given tokens must be in 0..{self.model.num_tokens}, not {num_given}"
            )
        if originals is None and num_given:
            raise UserError("given tokens need the images that they are taken from")


class DrawOptions(TypedDict, total=False):
    """Keyword arguments of `Sampler.tokens` and `Sampler.rounds`.

    Attributes:
        conditions: conditions by name, one row per image.
        order: int64 `[b or 1, n]`; by default the schedule's.
        given: the first tokens `[b, p, ...]` in the order, as the model predicts them.
        cached: see `generate_in_steps`; True by default.
        static: likewise; None by default.
    """

    conditions: Mapping[str, Tensor] | None
    order: Tensor | None
    given: Tensor | None
    cached: bool
    static: bool | None


class Acceptance:
    """Acceptance statistics of guidance's rejection sampling, over all draws of this process."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None

    def add(self, counts: Tensor | None) -> None:
        """Add the counts of a step, int64 `[3]`: values requested, accepted, and proposed."""
        if counts is not None:
            self.counts = counts if self.counts is None else self.counts + counts

    @property
    def rate(self) -> float:
        """Share of the proposals that were accepted."""
        _, found, proposed = self._numbers()
        return found / max(1, proposed)

    @property
    def share_found(self) -> float:
        """Share of the values for which a proposal was accepted; 0.999 in the paper."""
        wanted, found, _ = self._numbers()
        return found / max(1, wanted)

    def _numbers(self) -> list[int]:
        return [0, 0, 0] if self.counts is None else self.counts.tolist()


def _in_turn(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the rows for images with these indices, cycling through `rows`."""
    return rows[(numbers % len(rows)).to(rows.device)]


@dataclass(frozen=True)
class Search:
    """Options of beam search, for sequential schedules; raise UserError for a value below 1."""

    beams: int = 1
    """Sequences kept per image."""
    fans: int = 1
    """Candidates sampled per sequence; with one beam and one candidate there is no search."""

    def __post_init__(self) -> None:
        if min(self.beams, self.fans) < 1:
            raise UserError("beams and fans must be at least 1")


def settings_of(
    model: Model,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    spell: Callable[[str], str] = str,
) -> GenerationSettings:
    """Distribute options by name (None: the default) to density, schedule and beam search.

    Raises:
        UserError: an option does not apply to this model, or a value is out of range.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    density_type, schedule_type = model.density.options_type, model.schedule.options_type
    owners = [density_type, schedule_type]
    if model.schedule.is_sequential:
        owners.append(Search)
    names = [field.name for owner in owners for field in fields(owner)]
    if others := [spell(name) for name in chosen if name not in names]:
        verb = "does" if len(others) == 1 else "do"
        takes = ", ".join(map(spell, names)) or "no options"
        raise UserError(
            f"{', '.join(others)} {verb} not apply to this run of {model.config.objective.name},"
            f" which takes {takes}"
        )
    for owner in owners:
        _check_types(owner, chosen, spell)
    search = _take(Search, chosen)
    searches = max(search.beams, search.fans) > 1
    scored = searches or model.schedule.needs_score
    token_sampler = model.density.token_sampler(_take(density_type, chosen), scored=scored)
    in_steps = _take(schedule_type, chosen)
    if searches and not model.schedule.samples_one(in_steps):
        raise UserError(
            f"beam search compares sequences token by token, and {spell('rounds')} samples several"
            f" tokens at once: leave out {spell('rounds')}, or {spell('beams')} and {spell('fans')}"
        )
    if searches and token_sampler.num_lanes > 1:
        raise UserError(
            f"{spell('guidance')} samples from an unnormalised density, which beam search cannot"
            f" compare: leave out {spell('beams')} and {spell('fans')}"
        )
    return GenerationSettings(token_sampler, in_steps, search.beams, search.fans, seed)


def _check_types(owner: type, chosen: Mapping[str, Any], spell: Callable[[str], str]) -> None:
    """Raise UserError for an option that is no number where one is expected."""
    words = {int: ("a whole number", Integral), float: ("a number", Real), str: ("a word", str)}
    for name, hint in get_type_hints(owner).items():
        kinds = [words[each] for each in (get_args(hint) or (hint,)) if each in words]
        if name not in chosen or not kinds:
            continue
        value = chosen[name]
        if isinstance(value, bool) or not isinstance(value, tuple(kind for _, kind in kinds)):
            expected = " or ".join(word for word, _ in kinds)
            raise UserError(f"{spell(name)} must be {expected}, not {value!r}")


def _take(owner: type, chosen: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(owner)}
    return owner(**{name: value for name, value in chosen.items() if name in names})
