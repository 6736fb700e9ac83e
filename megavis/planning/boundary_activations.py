"""Activations that the first layer, bridges and the head with its loss keep for the backward pass.

They are the paper's own code, so it is run, on the meta device, where tensors have shapes and no
numbers, and what autograd saves is counted. A tensor group splits them each in its own way, so they
are run once for every way, in the place of one of its processes.

Storages that operations make and hold at once, on any device, `meta` too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megavis.composition.objective import Objective
from megavis.composition.trainable import SequenceBatch
from megavis.config.schema import RunConfig
from megavis.model.attention import Attention
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.parts import distinct_layers
from megavis.model.stack import LayerPlan, PlannedStack, Predictions
from megavis.papers import build_objective
from megavis.parallel.context import ParallelContext, close_context, open_virtual_context
from megavis.planning.layouts import LayoutKey, layout_key

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Two images, so that a dimension of one image is not taken for one that is shared by all.
_IMAGES = 2

Storages = dict[int, Tensor]
"""A tensor of each storage, by the storage's place."""


@dataclass(frozen=True)
class BoundaryActivations:
    """Bytes an image on one process of a tensor group.

    A stack inside the last layer is in what that saves.

    Attributes:
        embedding: saved in the first layer.
        head: saved in the last layer and the loss.
        outputs: what the last layer gives.
        scores: the same in float32, in which losses work.
        bridges: saved above each stack but the last.
        bridge_passes: the most that the forward pass of each holds besides what it saves.
        widest: of what the last layer saves, the largest tensor.
    """

    embedding: float
    head: float
    outputs: float
    scores: float
    bridges: tuple[float, ...] = ()
    bridge_passes: tuple[float, ...] = ()
    widest: float = 0.0


def boundary_activations_of_layouts(
    layouts: Iterable[RunConfig],
) -> dict[LayoutKey, BoundaryActivations]:
    """Measure both ends in every way in which they run in these layouts of a config.

    No context may be open.
    """
    ways = {layout_key(config.parallel): config for config in layouts}
    found: dict[LayoutKey, BoundaryActivations] = {}
    for size in sorted({way[0] for way in ways}):
        context = open_virtual_context(0, size, tensor_model_parallel_size=size, device="meta")
        try:
            for way, config in ways.items():
                if way[0] == size:
                    found[way] = boundary_activations_of(_objective(config, context))
        finally:
            close_context()
    return found


def _objective(config: RunConfig, context: ParallelContext) -> Objective:
    return build_objective(config, context).backbone.composition()


def boundary_activations_of(objective: Objective) -> BoundaryActivations:
    """Measure the layers that are no blocks in the objective's own context."""
    dtype = DTYPES[objective.config.training.precision]
    first_plan, *between, last_plan = objective.layer_plans()
    first, last = (_built(plan, dtype) for plan in (first_plan, last_plan))
    sequence = objective.blank_sequence(_IMAGES, torch.device("meta"))
    embedding, state = saved_tensors(lambda: first(sequence.inputs), [first])
    bridges, passes, state = _through(between, state, dtype)
    score = partial(_score, objective, last, state, sequence)
    head, outputs = saved_tensors(score, [last])
    given = outputs if isinstance(outputs, tuple) else (outputs,)
    numbers = sum(tensor.numel() for tensor in given if tensor.is_floating_point())
    return BoundaryActivations(
        embedding=num_bytes(embedding) / _IMAGES + _kernels(first_plan),
        head=num_bytes(head) / _IMAGES + _kernels(last_plan),
        outputs=sum(tensor.nbytes for tensor in given) / _IMAGES,
        scores=torch.float32.itemsize * numbers / _IMAGES,
        bridges=tuple(bridges),
        bridge_passes=tuple(passes),
        widest=max(tensor.untyped_storage().nbytes() for tensor in head.values()) / _IMAGES,
    )


def _built(plan: LayerPlan, dtype: torch.dtype) -> nn.Module:
    """Return a layer for this measurement alone, on the meta device."""
    with torch.device("meta"):
        layer = plan.build().to(dtype).train()
    for module in layer.modules():
        if isinstance(module, Attention):
            # Without numbers torch takes a kernel that keeps all scores: see `_kernels`.
            module.recompute = True
    return layer


def _kernels(plan: LayerPlan) -> float:
    """Return the bytes an image that attention keeps inside a layer where it is not recomputed.

    A number in float32 for each head and token that is read.
    """
    stack = plan.inner
    if stack is None or stack.core.config.parallel.activation_checkpointing != "none":
        return 0.0
    work, model = stack.work, stack.core.model
    num_read = (model.num_layers - 1) * work.num_tokens + work.num_read
    num_heads = model.num_attention_heads // stack.core.groups.tp.size()
    return float(torch.float32.itemsize * num_heads * num_read)


def _through(
    plans: Sequence[LayerPlan], state: PackedState, dtype: torch.dtype
) -> tuple[list[float], list[float], PackedState]:
    """Return the bytes an image that bridges save, and hold besides; what leaves the last block.

    Stacks are not run: what leaves one has the shape of what enters it, but for unread tokens.
    """
    saved: list[float] = []
    passes: list[float] = []
    for plan, _ in distinct_layers(plans):
        if plan.stack is not None:
            saved.append(0.0)
            passes.append(0.0)
            state = _above(plan.stack, state)
            continue
        bridge = _built(plan, dtype)
        with LiveStorages() as live:
            kept, state = saved_tensors(partial(bridge, state), [bridge])
        saved[-1] += num_bytes(kept) / _IMAGES
        besides = live.most - sum(live.sizes.get(place, 0) for place in kept)
        passes[-1] = max(passes[-1], besides / _IMAGES)
    return saved[:-1], passes[:-1], state


def _above(stack: PlannedStack, state: PackedState) -> PackedState:
    """Return what leaves a stack that this enters, with a gradient of its own."""
    core = stack.core
    stream = LayerState.unpack(state, core.carried_names)
    num_parts = core.groups.tp.size() if core.megatron.sequence_parallel else 1
    read = stream.hidden[-(stack.work.num_read // num_parts) :]
    return stream.with_hidden(read.detach().requires_grad_()).pack()


def _score(
    objective: Objective, head: nn.Module, state: PackedState, sequence: SequenceBatch
) -> Predictions:
    """Run the head and the loss; return the head's outputs."""
    outputs: Predictions = head(state)
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
    place: int = storage_of(tensor)._cdata
    return place


class LiveStorages(TorchDispatchMode):
    """Storages that operations inside have made, until they are freed.

    Attributes:
        sizes: bytes of those that are alive, by their place.
        most: bytes at the worst moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.num_bytes = self.most = 0

    def counted(self) -> int:
        """Return the bytes of those alive that count."""
        return self.num_bytes

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and see what it made, which is not a view of what it was given."""
        known = {storage_of(tensor)._cdata for tensor in _tensors((args, kwargs))}
        made = operation(*args, **(kwargs or {}))
        for storage in map(storage_of, _tensors(made)):
            if storage._cdata not in known and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.num_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        if self.num_bytes > self.most:
            self.most = max(self.most, self.counted())
        return made

    def _free(self, place: int) -> None:
        self.num_bytes -= self.sizes.pop(place)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return what holds a tensor's numbers."""
    return tensor.untyped_storage()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
