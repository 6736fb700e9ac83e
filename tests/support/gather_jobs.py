"""What ZeRO-3 gathers in the passes of a pipeline stage, and when."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from memory_jobs import blank_batch, engine_of, read

from megavis.parallel.launch import Launch
from megavis.training import deepspeed_config


@dataclass(frozen=True)
class Event:
    """A gather is launched, or a layer starts to compute.

    Attributes:
        kind: `gather`, `forward` or `backward`.
        layers: place in the stage of the layers whose weights are gathered, or of the one that
            computes.
        states: of the weights of the next layer in this direction, as DeepSpeed names them.
        live: elements that are gathered or being gathered, of all layers.
    """

    kind: str
    layers: frozenset[int]
    states: frozenset[str] = frozenset()
    live: int = 0

    @property
    def layer(self) -> int:
        """The only layer."""
        (layer,) = self.layers
        return layer


@dataclass(frozen=True)
class Gathers:
    """Events of a step of one process, and the parameters of each of its layers.

    Persistent ones, which DeepSpeed gathers after each step, are left out.
    """

    events: list[Event]
    parameters: list[list[int]]

    @property
    def sizes(self) -> list[int]:
        """Elements of each layer."""
        return [sum(each) for each in self.parameters]


def gathers_of_a_step(
    launch: Launch, path: str, words: list[str], bucket: int | None = None
) -> Gathers:
    """Train for two steps; return the events of the second.

    Args:
        launch: of this process.
        path: of the config.
        words: overrides.
        bucket: DeepSpeed's `prefetch_bucket_size`; default: as configured.
    """
    with pytest.MonkeyPatch.context() as patch:
        if bucket is not None:
            made, own = deepspeed_config._zero, {"stage3_prefetch_bucket_size": bucket}
            patch.setattr(
                deepspeed_config, "_zero", lambda *args, **keys: made(*args, **keys) | own
            )
        with engine_of(launch, read(path, words)) as engine:
            batches = itertools.repeat(blank_batch(engine))
            engine.train_step(batches, 0)
            watch = _Watch(engine.layers.modules)
            engine.train_step(batches, 1)
            return Gathers(watch.events, [[p.ds_numel for p in own] for own in watch.parameters])


class _Watch:
    def __init__(self, layers: Sequence[Any]) -> None:
        self.events: list[Event] = []
        self.parameters = [[p for p in layer.parameters() if not p.ds_persist] for layer in layers]
        self._computing: tuple[str, int] | None = None
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._compute, "forward", place))
            for parameter in layer.parameters():
                parameter.register_hook(functools.partial(self._compute, "backward", place))
                gather = functools.partial(self._gather, parameter.all_gather_coalesced)
                parameter.all_gather_coalesced = gather

    def _compute(self, kind: str, place: int, *_: Any) -> None:
        """Note the start of a layer: its forward pass, or the first gradient of it."""
        if self._computing == (kind, place):
            return
        self._computing = kind, place
        following = place + (1 if kind == "forward" else -1)
        own = self.parameters[following] if 0 <= following < len(self.parameters) else []
        states = frozenset(parameter.ds_status.name for parameter in own)
        live = sum(
            parameter.ds_numel
            for parameter in itertools.chain.from_iterable(self.parameters)
            if parameter.ds_status is not ZeroParamStatus.NOT_AVAILABLE
        )
        self.events.append(Event(kind, frozenset([place]), states, live))

    def _gather(self, gather: Any, parameters: list[Any], **options: Any) -> Any:
        owners = {id(p): place for place, own in enumerate(self.parameters) for p in own}
        layers = frozenset(owners[id(p)] for p in parameters if id(p) in owners)
        if layers:
            self.events.append(Event("gather", layers))
        return gather(parameters, **options)
