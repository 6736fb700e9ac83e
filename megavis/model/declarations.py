"""Declare how a parameter is trained where it is created: decay, learning rate, initial value.

Like Megatron's, declarations are attributes of the parameter, since ZeRO-3 and the pipeline engine
keep parameter objects but change their shapes.

Weight decay applies to all parameters with two or more dimensions except those declared here:
tables (embeddings, codebooks, positions) and learned tokens. As in the released code of MAE and
GIVT, weights of linear layers and convolutions decay, biases and the gains of norms do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

_WITHOUT_DECAY, _OPTIONS, _START = "without_weight_decay", "group_options", "finetuning_start"

Start = Literal["saved", "fresh", "saved or fresh"]
"""Weights of a parameter when fine-tuning starts from another run: the saved ones, the initial
ones, or the saved ones if the run has them."""


@dataclass(frozen=True)
class ParamGroupOptions:
    """Optimizer options of a parameter that differ from the config's.

    Attributes:
        learning_rate_scale: multiplies the scheduled learning rate.
        betas: Adam's betas; the config's if None.
    """

    learning_rate_scale: float = 1.0
    betas: tuple[float, float] | None = None

    def scaled(self, factor: float) -> ParamGroupOptions:
        """Return a copy with the learning rate multiplied by `factor`."""
        return replace(self, learning_rate_scale=self.learning_rate_scale * factor)

    def within(self, layer: ParamGroupOptions) -> ParamGroupOptions:
        """Combine a parameter's options with those of its layer; its own betas take precedence."""
        scaled = layer.scaled(self.learning_rate_scale)
        return scaled if self.betas is None else replace(scaled, betas=self.betas)


def without_decay(parameter: Tensor) -> None:
    """Exclude a parameter from weight decay."""
    _declare(parameter, _WITHOUT_DECAY, True)


def is_without_decay(parameter: Tensor) -> bool:
    """Return whether `without_decay` was called for a parameter."""
    return getattr(parameter, _WITHOUT_DECAY, False)


def add_options(parameters: Iterable[Tensor], options: ParamGroupOptions) -> None:
    """Declare optimizer options of parameters, combined with earlier declarations."""
    for parameter in parameters:
        _declare(parameter, _OPTIONS, options_of(parameter).within(options))


def options_of(parameter: Tensor) -> ParamGroupOptions:
    """Return the options declared by `add_options`."""
    return getattr(parameter, _OPTIONS, ParamGroupOptions())


def set_start(parameters: Iterable[Tensor], start: Start) -> None:
    """Declare the weights of parameters when fine-tuning starts; the default is `saved`."""
    for parameter in parameters:
        _declare(parameter, _START, start)


def starts_fresh(parameter: Tensor, *, is_saved: bool) -> bool:
    """Return whether a parameter keeps its initial weights when fine-tuning starts.

    `is_saved`: whether the pretrained run has this parameter.
    """
    start: Start = getattr(parameter, _START, "saved")
    return start == "fresh" or (start == "saved or fresh" and not is_saved)


def _declare(parameter: Tensor, attribute: str, value: Any) -> None:
    setattr(parameter, attribute, value)
