"""Declarations of a parameter where it is created: decay, learning rate, initial value.

A declaration is an attribute of the parameter, as Megatron's own are: ZeRO-3 and the pipeline
engine keep parameters, whatever they do to their shapes.

Everything of two or more dimensions decays but what is declared here: tables that are looked up
(embeddings, codebooks, positions) and learned tokens. So MAE's and GIVT's released code has it: the
kernels of linear maps and convolutions decay, biases and the gains of norms do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

_WITHOUT_DECAY, _OPTIONS, _START = "without_weight_decay", "group_options", "finetuning_start"

Start = Literal["saved", "fresh", "saved or fresh"]
"""Weights that a parameter has when fine-tuning starts from another run: that run's, the initial
ones, or that run's where it has some."""


@dataclass(frozen=True)
class ParamGroupOptions:
    """Optimizer options of a parameter that differ from the config's.

    Attributes:
        learning_rate_scale: multiplies the scheduled learning rate.
        betas: Adam's decay rates; those of the config when None.
    """

    learning_rate_scale: float = 1.0
    betas: tuple[float, float] | None = None

    def scaled(self, factor: float) -> ParamGroupOptions:
        """Return the same with another learning rate."""
        return replace(self, learning_rate_scale=self.learning_rate_scale * factor)

    def within(self, layer: ParamGroupOptions) -> ParamGroupOptions:
        """Return the options of a parameter that has these in a layer that has those."""
        scaled = layer.scaled(self.learning_rate_scale)
        return scaled if self.betas is None else replace(scaled, betas=self.betas)


def without_decay(parameter: Tensor) -> None:
    """Declare that weight decay leaves a parameter alone."""
    _declare(parameter, _WITHOUT_DECAY, True)


def is_without_decay(parameter: Tensor) -> bool:
    """Return whether `without_decay` was called for a parameter."""
    return getattr(parameter, _WITHOUT_DECAY, False)


def add_options(parameters: Iterable[Tensor], options: ParamGroupOptions) -> None:
    """Declare how the optimizer treats parameters, on top of what they declare already."""
    for parameter in parameters:
        _declare(parameter, _OPTIONS, options_of(parameter).within(options))


def options_of(parameter: Tensor) -> ParamGroupOptions:
    """Return what `add_options` declared of a parameter."""
    return getattr(parameter, _OPTIONS, ParamGroupOptions())


def set_start(parameters: Iterable[Tensor], start: Start) -> None:
    """Declare which weights parameters have when fine-tuning starts; others have saved ones."""
    for parameter in parameters:
        _declare(parameter, _START, start)


def starts_fresh(parameter: Tensor, *, is_saved: bool) -> bool:
    """Return whether a parameter keeps its initial weights when fine-tuning starts.

    Args:
        parameter: of the model that is fine-tuned.
        is_saved: the run that it starts from has this parameter.
    """
    start: Start = getattr(parameter, _START, "saved")
    return start == "fresh" or (start == "saved or fresh" and not is_saved)


def _declare(parameter: Tensor, attribute: str, value: Any) -> None:
    setattr(parameter, attribute, value)
