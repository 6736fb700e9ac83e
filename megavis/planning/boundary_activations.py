"""Measure the activations of the first layer, of bridges, and of the head with its loss.

These layers differ from paper to paper, so they are run on the meta device, where tensors have
shapes but no data, and the tensors that autograd saves are counted. Tensor and context
parallelism split each in its own way, so they are run once per kind of layout, as one process of
both groups.
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
from torch.utils.checkpoint import checkpoint

from megavis.composition.trainable import SequenceBatch, Trainable
from megavis.config.schema import RunConfig
from megavis.model.attention import Attention
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.stack import LayerPlan, PlannedStack, Predictions, distinct_layers
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_virtual_context
from megavis.parallel.device import DTYPES
from megavis.planning.layouts import LayoutKey, layout_key

# Two images, so that a batch dimension is not mistaken for a broadcast dimension of size 1.
_IMAGES = 2

Storages = dict[int, Tensor]
"""One tensor per storage, by the storage's address."""


@dataclass(frozen=True)
class BoundaryActivations:
    """Bytes per image on one process of a tensor and a context group.

    A stack inside the last layer is included.

    Attributes:
        embedding: saved in the first layer.
        head: saved in the last layer and the loss.
        outputs: output of the last layer.
        saved_outputs: what of it is part of `head`.
        loss_backward: peak of the gradients and other temporaries in the loss's backward pass.
        bridges: saved above each stack but the last.
        bridge_passes: peak of the other temporaries in each bridge's forward pass.
        widest: largest tensor saved in the last layer.
    """

    embedding: float
    head: float
    outputs: float
    saved_outputs: float
    loss_backward: float
    bridges: tuple[float, ...] = ()
    bridge_passes: tuple[float, ...] = ()
    widest: float = 0.0


def boundary_activations_of_layouts(
    layouts: Iterable[RunConfig],
) -> dict[LayoutKey, BoundaryActivations]:
    """Measure the boundary layers in every way in which they run in these layouts of a config.

    There must be no open parallel context.
    """
    ways = {layout_key(config.parallel): config for config in layouts}
    found: dict[LayoutKey, BoundaryActivations] = {}
    for tensor, parts in sorted({way[:2] for way in ways}):
        context = open_virtual_context(
            0,
            tensor * parts,
            tensor_model_parallel_size=tensor,
            context_parallel_size=parts,
            device="meta",
        )
        try:
            for way, config in ways.items():
                if way[:2] == (tensor, parts):
                    found[way] = boundary_activations_of(build_objective(config, context))
        finally:
            close_context()
    return found


def boundary_activations_of(objective: Trainable) -> BoundaryActivations:
    """Measure the layers other than blocks, in the objective's own context."""
    dtype = DTYPES[objective.config.training.precision]
    first_plan, *between, last_plan = objective.layer_plans()
    first, last = (_built(plan, dtype) for plan in (first_plan, last_plan))
    sequence = objective.blank_sequence(_IMAGES, torch.device("meta"))
    embedding, state = saved_tensors(lambda: first(sequence.inputs), [first])
    bridges, passes, state = _through(between, state, dtype)
    score = partial(_score, objective, last, state, sequence)
    head, outputs = saved_tensors(score, [last])
    given = outputs if isinstance(outputs, tuple) else (outputs,)
    return BoundaryActivations(
        embedding=num_bytes(embedding) / _IMAGES + _kernels(first_plan),
        head=num_bytes(head) / _IMAGES + _kernels(last_plan),
        outputs=sum(tensor.nbytes for tensor in given) / _IMAGES,
        saved_outputs=sum(each.nbytes for each in given if _place(each) in head) / _IMAGES,
        loss_backward=_loss_backward(objective, outputs, sequence) / _IMAGES,
        bridges=tuple(bridges),
        bridge_passes=tuple(passes),
        widest=max(tensor.untyped_storage().nbytes() for tensor in head.values()) / _IMAGES,
    )


def _built(plan: LayerPlan, dtype: torch.dtype) -> nn.Module:
    """Build a layer on the meta device for this measurement."""
    with torch.device("meta"):
        layer = plan.build().to(dtype).train()
    for module in layer.modules():
        if isinstance(module, Attention):
            # On the meta device torch chooses a kernel that keeps all scores; see `_kernels`.
            module._attend = partial(  # type: ignore[method-assign]
                checkpoint, module._attend, use_reentrant=True
            )
    return layer


def _kernels(plan: LayerPlan) -> float:
    """Return the bytes per image that attention kernels save if blocks are not recomputed.

    This is one float32 per head and query.
    """
    stack = plan.inner
    if stack is None or stack.core.config.parallel.activation_checkpointing == "full":
        return 0.0
    work, model = stack.work, stack.core.model
    num_read = (model.num_layers - 1) * work.num_tokens + work.num_read
    groups = stack.core.groups
    num_heads = model.num_attention_heads // groups.tp.size()
    return torch.float32.itemsize * num_heads * num_read / groups.cp.size()


def _through(
    plans: Sequence[LayerPlan], state: PackedState, dtype: torch.dtype
) -> tuple[list[float], list[float], PackedState]:
    """Run the bridges. Return bytes per image saved, other temporaries, and the final state.

    Stacks are skipped: except for tokens that are not read, their output has their input's shape.
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
    """Return the output state of a stack, as a new leaf that requires a gradient."""
    core = stack.core
    stream = LayerState.unpack(state, core.carried_names)
    num_parts = core.groups.tp.size() if core.megatron.sequence_parallel else 1
    num_parts *= core.megatron.context_parallel_size
    read = stream.hidden[-(stack.work.num_read // num_parts) :]
    return stream.with_hidden(read.detach().requires_grad_()).pack()


def _score(
    objective: Trainable, head: nn.Module, state: PackedState, sequence: SequenceBatch
) -> Predictions:
    """Run the head and the loss; return the head's outputs."""
    outputs: Predictions = head(state)
    objective.loss(outputs, sequence.targets)
    return outputs


def _loss_backward(objective: Trainable, outputs: Predictions, sequence: SequenceBatch) -> int:
    """Return the peak bytes of the gradients that the loss computes for the head's outputs."""

    def leaf(output: Tensor) -> Tensor:
        return output.detach().requires_grad_(output.requires_grad)

    leaves = leaf(outputs) if isinstance(outputs, Tensor) else tuple(map(leaf, outputs))
    loss = objective.loss(leaves, sequence.targets)
    with LiveStorages() as live:
        loss.backward()
    return live.most


def saved_tensors(
    run: Callable[[], Any], modules: Iterable[nn.Module] = ()
) -> tuple[Storages, Any]:
    """Return the tensors but parameters that autograd saves during `run`, and its result."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    # Keep the tensors alive: the address of a freed storage may be reused.
    saved: Storages = {}

    def keep(tensor: Tensor) -> Tensor:
        place = _place(tensor)
        # Look it up each time: ZeRO-3 allocates a new storage whenever it gathers a parameter.
        if all(place != _place(parameter) for parameter in parameters):
            saved.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return saved, result


def num_bytes(storages: Storages) -> int:
    """Return the total bytes of the storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _place(tensor: Tensor) -> int:
    # On the meta device every address is 0; this is the address of the storage object itself.
    place: int = storage_of(tensor)._cdata
    return place


class LiveStorages(TorchDispatchMode):
    """Track storages created by operations in this context until they are freed.

    `sizes` has the bytes of live storages by address, `most` their peak, `made` the bytes of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.num_bytes = self.most = self.made = 0

    def counted(self) -> int:
        """Return the bytes of live storages that are counted."""
        return self.num_bytes

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and record its new storages; views of its arguments have none."""
        known = {storage_of(tensor)._cdata for tensor in _tensors((args, kwargs))}
        made = operation(*args, **(kwargs or {}))
        for storage in map(storage_of, _tensors(made)):
            if storage._cdata not in known and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.num_bytes += storage.nbytes()
                self.made += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        if self.num_bytes > self.most:
            self.most = max(self.most, self.counted())
        return made

    def _free(self, place: int) -> None:
        self.num_bytes -= self.sizes.pop(place)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage that holds a tensor's data."""
    return tensor.untyped_storage()


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for part in tree for tensor in _tensors(part)]
