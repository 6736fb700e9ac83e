"""What the first layer, and the last one with the loss, keep for the backward pass.

Both are the paper's own code, so it is run, on the meta device, where tensors have shapes and no
numbers, and what autograd saves is counted. A tensor group splits them each in its own way, so they
are run once for every way, in the place of one of its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megavis.config.schema import RunConfig
from megavis.model.stack import Predictions
from megavis.model.stream import State, Stream
from megavis.objectives import build_objective
from megavis.objectives.base import Objective, Sequence
from megavis.parallel.context import ParallelContext, close_context, open_virtual_context
from megavis.planning.layouts import Way, way_of

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Two images, so that a dimension of one image is not taken for one that is shared by all.
_IMAGES = 2

Storages = dict[int, Tensor]
"""A tensor of each storage, by the storage's place."""


@dataclass(frozen=True)
class Ends:
    """Bytes an image on one process of a tensor group.

    Attributes:
        embedding: saved in the first layer.
        head: saved in the last layer and the loss.
        outputs: what the last layer gives.
        scores: the same in float32, in which losses work.
    """

    embedding: float
    head: float
    outputs: float
    scores: float


def ends_of_layouts(layouts: Iterable[RunConfig]) -> dict[Way, Ends]:
    """Measure both ends in every way in which they run in these layouts of a config.

    No context may be open.
    """
    ways = {way_of(config.parallel): config for config in layouts}
    found: dict[Way, Ends] = {}
    for size in sorted({way[0] for way in ways}):
        context = open_virtual_context(0, size, tensor_model_parallel_size=size, device="meta")
        try:
            for way, config in ways.items():
                if way[0] == size:
                    found[way] = ends_of(_objective(config, context))
        finally:
            close_context()
    return found


def _objective(config: RunConfig, context: ParallelContext) -> Objective:
    return build_objective(config, context).composition()


def ends_of(objective: Objective) -> Ends:
    """Measure both ends in the objective's own context."""
    dtype = DTYPES[objective.config.training.precision]
    first_plan, *_, last_plan = objective.layer_plans()
    with torch.device("meta"):
        first, last = (plan.build().to(dtype).train() for plan in (first_plan, last_plan))
    sequence = objective.blank_sequence(_IMAGES, torch.device("meta"))
    embedding, state = saved_tensors(lambda: first(sequence.inputs), [first])
    head, outputs = saved_tensors(lambda: _score(objective, last, state, sequence), [last])
    given = outputs if isinstance(outputs, tuple) else (outputs,)
    numbers = sum(tensor.numel() for tensor in given if tensor.is_floating_point())
    return Ends(
        embedding=num_bytes(embedding) / _IMAGES,
        head=num_bytes(head) / _IMAGES,
        outputs=sum(tensor.nbytes for tensor in given) / _IMAGES,
        scores=torch.float32.itemsize * numbers / _IMAGES,
    )


def _score(objective: Objective, head: nn.Module, state: State, sequence: Sequence) -> Predictions:
    """Run the head on what would come out of the last block, and the loss; return its outputs."""
    stream, core = Stream.unpack(state, objective.core.carries), objective.core
    num_parts = core.groups.tp.size() if core.megatron.sequence_parallel else 1
    num_read = objective.workload().num_read // num_parts
    read = stream.hidden[-num_read:]
    left = stream.with_hidden(read.detach().requires_grad_()).pack()
    outputs: Predictions = head(left)
    objective.loss(outputs, sequence.targets)
    return outputs


def saved_tensors(
    run: Callable[[], Any], modules: Iterable[nn.Module] = ()
) -> tuple[Storages, Any]:
    """Return what autograd saves while `run` runs, and what it returned.

    Args:
        run: a forward pass.
        modules: whose parameters are not counted: they are there anyway.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    # Kept until the end: a storage that is freed would leave its name to another.
    saved: Storages = {}

    def keep(tensor: Tensor) -> Tensor:
        place = _place(tensor)
        # Asked each time: ZeRO-3 gives a parameter another storage whenever it gathers it.
        if all(place != _place(parameter) for parameter in parameters):
            saved.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return saved, result


def num_bytes(storages: Storages) -> int:
    """Return the bytes of all storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place
