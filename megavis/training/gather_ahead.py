"""Under ZeRO-3, gather the weights of a stage's next layer while the current one computes.

Without pipeline stages, DeepSpeed gathers ahead along the order of modules that it has recorded.
The layers of a stage run in the order of its list, and backwards in backward passes, so when the
first module of a layer asks for its weights, those of the following layer are gathered too. All
processes that share weights hold the same stage, so they issue the same collectives in the same
order.

Within a layer, only weights are gathered ahead that its modules have asked for before, in such a
pass: those that are read outside their module, DeepSpeed gathers when they are read, and remembers
that it did.

What is recomputed in a backward pass uses the weights gathered ahead. If its modules release them
afterwards, as those of blocks with inputs besides hidden states do, they are gathered again when
they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch import nn

FORWARD, BACKWARD = 1, -1


class GatherAhead:
    """Gathers ahead within `running`.

    While a layer computes, the process holds its weights and no more of the next layer's than
    DeepSpeed would gather ahead without stages.
    """

    def __init__(
        self, layers: Sequence[nn.Module], coordinator: Any, *, bucket: int, most_live: int
    ) -> None:
        """Follow the requests for weights.

        Args:
            layers: of the stage, partitioned by DeepSpeed.
            coordinator: DeepSpeed's, which modules ask for their weights.
            bucket: parameters of the next layer after which no more of them are gathered, not
                counting those that DeepSpeed calls persistent.
            most_live: the same for those of both layers.
        """
        self._place = {
            module: place for place, layer in enumerate(layers) for module in layer.modules()
        }
        # DeepSpeed's attributes of parameters are unknown to torch's types.
        self._asked: dict[int, list[set[Any]]] = {
            step: [set() for _ in layers] for step in (FORWARD, BACKWARD)
        }
        self._room = [
            min(bucket, most_live - sum(_size(each) for each in layer.parameters()))
            for layer in layers
        ]
        self._fetch = coordinator.fetch_sub_module
        coordinator.fetch_sub_module = self._fetch_sub_module
        self._step = 0
        self._handles: dict[int, list[Any]] = {}
        self._gathered: list[Any] = []

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Gather ahead in a pass over all layers, `FORWARD` or `BACKWARD`."""
        self._step = step
        try:
            yield
        finally:
            self._step = 0
        # What no module has asked for this time.
        for place in [*self._handles]:
            self._wait(place)
        for parameter in self._gathered:
            is_whole = parameter.ds_status is ZeroParamStatus.AVAILABLE
            if is_whole and not parameter.ds_active_sub_modules:
                parameter.partition()
        self._handles, self._gathered = {}, []

    def _fetch_sub_module(self, module: nn.Module, forward: bool) -> None:
        """Do what DeepSpeed's function of this name does, and gather ahead."""
        place = self._place.get(module)
        if not self._step or place is None:
            self._fetch(module, forward)
            return
        self._wait(place)
        self._fetch(module, forward)
        asked = self._asked[self._step]
        asked[place].update(iter_params(module, recurse=z3_leaf_module(module)))
        following = place + self._step
        if 0 <= following < len(asked) and following not in self._handles:
            self._handles[following] = self._gather(asked[following], self._room[place])

    @torch.no_grad()
    def _gather(self, parameters: set[Any], room: int) -> list[Any]:
        """Start to gather partitioned parameters in DeepSpeed's order; return what to wait for."""
        # Those with and without a copy from hierarchical partitioning have different groups.
        chosen: dict[bool, list[Any]] = {}
        for parameter in sorted(parameters, key=lambda each: each.ds_id):
            if room <= 0:
                break
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                room -= _size(parameter)
                has_copy = parameter.ds_secondary_tensor is not None
                chosen.setdefault(has_copy, []).append(parameter)
                self._gathered.append(parameter)
        return [group[0].all_gather_coalesced(group) for _, group in sorted(chosen.items())]

    @torch.no_grad()
    def _wait(self, place: int) -> None:
        """Wait for the weights of a layer; they remain noted as gathered in this pass."""
        for handle in self._handles.get(place, ()):
            handle.wait()
        self._handles[place] = []


def _size(parameter: Any) -> int:
    """Return the number of elements, 0 for persistent parameters."""
    return 0 if parameter.ds_persist else int(parameter.ds_numel)
