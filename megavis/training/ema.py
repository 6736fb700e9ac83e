"""Exponential moving average of the weights, kept with the optimizer's master weights.

θ̄ ← decay · θ̄ + (1 - decay) · θ after every step, starting from the weights after the first one.
The average is another optimizer state, so it is partitioned like the master weights at any ZeRO
stage, and offloaded with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megavis.checkpoint.format.manifest import TensorKind
from megavis.checkpoint.state.parameter_states import AVERAGE, ParameterStates
from megavis.model.stack import LocalLayers


class WeightAverage:
    """Follows an optimizer, and replaces the weights during evaluation."""

    def __init__(self, decay: float, layers: LocalLayers, states: ParameterStates) -> None:
        self.decay, self.layers, self.states = decay, layers, states
        states.optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Under ZeRO the optimizer steps one flat partition after another, with a call for each;
        # under ZeRO-0 it is also called for a non-finite step, and skips it.
        share: Any = 1.0 - self.decay
        if hasattr(optimizer, "found_inf"):
            share = share * (1.0 - optimizer.found_inf)
        for group in optimizer.param_groups:
            for master in group["params"]:
                state = optimizer.state[master]
                if AVERAGE in state:
                    state[AVERAGE].lerp_(master.detach(), share)
                elif state:
                    state[AVERAGE] = master.detach().clone()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the weights within the block; called on every process.

        Before the first step there is no average, and the weights stay.
        """
        if not self.states.has(AVERAGE):
            yield
            return
        self._show(AVERAGE)
        try:
            yield
        finally:
            self._show("weight")

    def _show(self, kind: TensorKind) -> None:
        for _, parameter in self.layers.named_parameters():
            if parameter.requires_grad:
                self.states.show(parameter, kind)
