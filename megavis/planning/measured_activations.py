"""Measure the memory that each layer saves for the backward pass and allocates in both passes.

The layers of a model (the first one, one block and the last block of each stack, bridges, the head
with its loss) run on the meta device, where tensors have shapes but no data, so a paper's layers
need no formulas of their own. Tensor and context parallelism, sequence parallelism and activation
checkpointing each change them, so they run once per kind of layout, as one process of both groups.
Attention is assumed to use a flash kernel, which saves no scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megavis.composition.finetuned import finetuned_of
from megavis.composition.trainable import SequenceBatch, Trainable
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.model.attention import Attention
from megavis.model.core import Block
from megavis.model.feed_forward import FeedForward
from megavis.model.kernels import plain_kernels
from megavis.model.layer_state import PackedState
from megavis.model.stack import LayerPlan, Predictions, alike_layers
from megavis.papers import build_objective
from megavis.parallel.context import ParallelContext, close_context, open_virtual_context
from megavis.parallel.device import DTYPES
from megavis.planning.activations import (
    Growth,
    LayerActivations,
    ModelActivations,
    StackActivations,
)
from megavis.planning.layouts import LayoutKey, layout_key
from megavis.planning.meta_device import (
    FlashAttention,
    LiveStorages,
    RememberedShapes,
    place_of,
    saved_tensors,
)

# A prime that divides no size of a model: a storage grows with the images if and only if its number
# of bytes is a multiple. On the meta device many images take no longer than one.
_IMAGES = 31
_KINDS = frozenset({"none", "selective", "full"})


def activations_of_layouts(layouts: Iterable[RunConfig]) -> dict[LayoutKey, ModelActivations]:
    """Measure a model in every way in which it runs in these layouts of a config.

    Ways without recomputation are added, since time estimates compare with them. No parallel
    context may be open.
    """
    found: dict[LayoutKey, ModelActivations] = {}
    ways = sorted(_ways(layouts).items())
    for (tensor, parts), group in itertools.groupby(ways, lambda way: way[0][:2]):
        sizes = ParallelConfig(tensor_model_parallel_size=tensor, context_parallel_size=parts)
        context = open_virtual_context(0, tensor * parts, sizes, device="meta")
        try:
            found |= _in_context(dict(group), context)
        finally:
            close_context()
    return found


def activations_of_run(objective: Trainable) -> dict[LayoutKey, ModelActivations]:
    """Measure a model in the layout of its own context, with and without recomputation."""
    return _in_context(_ways([objective.config]), objective.context)


def _ways(layouts: Iterable[RunConfig]) -> dict[LayoutKey, RunConfig]:
    """Return one config for each way in which a layer runs, those without recomputation added."""
    ways: dict[LayoutKey, RunConfig] = {}
    for config in layouts:
        if layout_key(config.parallel) in ways:
            continue
        plain = config.parallel.model_copy(update={"activation_checkpointing": "none"})
        for parallel in (config.parallel, plain):
            if (key := layout_key(parallel)) not in ways:
                ways[key] = config.model_copy(update={"parallel": parallel})
    return ways


def _in_context(
    ways: Mapping[LayoutKey, RunConfig], context: ParallelContext
) -> dict[LayoutKey, ModelActivations]:
    """Measure the ways of one tensor and one context size."""
    known: dict[bool, _Ends] = {}
    found = {}
    for key, config in ways.items():
        ends = known.setdefault(config.parallel.sequence_parallel, _Ends())
        found[key] = activations_of(build_objective(config, context), ends)
    return found


@dataclass
class _Ends:
    """The first and last layer by `parallel.activation_checkpointing`, shared between ways.

    `sequence` is the input of the first and the targets of the last.
    """

    sequence: SequenceBatch | None = None
    first: dict[str, _Measured] = field(default_factory=dict)
    head: dict[str, _Head] = field(default_factory=dict)


def activations_of(objective: Trainable, ends: _Ends | None = None) -> ModelActivations:
    """Measure the layers of a model in the objective's own context.

    Args:
        ends: measurements of another way that differs only in activation checkpointing; new ones
            are added to it.
    """
    ends = ends or _Ends()
    first, *between, last = objective.layer_plans()
    dtype = DTYPES[objective.config.training.precision]
    kind = objective.config.parallel.activation_checkpointing
    if ends.sequence is None:
        ends.sequence = objective.blank_sequence(_IMAGES, torch.device("meta"))
    sequence = ends.sequence
    handed = _Handed([] if last.handed is None else last.handed)
    # A compiler would need to run, and Transformer Engine a GPU.
    with plain_kernels(), RememberedShapes():
        embedding = ends.first.get(kind) or _measured(first, sequence.inputs, dtype, handed)
        handed.found += embedding.handed
        stacks, state = _through(between, embedding.output, dtype, handed)
        head = ends.head.get(kind) or _whole_head(
            last, state, sequence.targets, dtype, objective, handed
        )
    ends.first |= dict.fromkeys(_equal_kinds(kind, embedding.recomputing), embedding)
    ends.head |= dict.fromkeys(_equal_kinds(kind, head.recomputing), head)
    return ModelActivations(
        first=embedding.activations,
        stacks=tuple(stacks),
        head=head.activations,
        outputs=head.outputs,
        saved_outputs=head.saved_outputs,
        head_flops=head.flops,
    )


def _equal_kinds(kind: str, recomputing: frozenset[str]) -> frozenset[str]:
    """Return the kinds of activation checkpointing under which a layer runs as under this one.

    Args:
        recomputing: those under which some part of the layer recomputes.
    """
    return frozenset({kind}) if kind in recomputing else _KINDS - recomputing


@dataclass
class _Handed:
    """Tensors that lower layers hand to the last one; see `LayerPlan.handed`, which is `box`.

    `found` are blank copies of everything that they have handed.
    """

    box: list[Any]
    found: list[Any] = field(default_factory=list)

    def narrowed(self, num_images: int) -> _Handed:
        """Return the same for fewer images, the second dimension of hidden states."""

        def part(tensor: Tensor) -> Tensor:
            return _part(tensor, 0 if len(tensor) == _IMAGES else 1, num_images)

        return _Handed(self.box, [_map(each, part) for each in self.found])


def _part(tensor: Tensor, dim: int, num_images: int) -> Tensor:
    return _blank(tensor.narrow(dim, 0, num_images))


def _blank(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form with its own storage."""
    return torch.empty_like(tensor, requires_grad=tensor.requires_grad)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class _Head:
    """The last layer with the loss, bytes per image of its output, and the saved part of them."""

    activations: LayerActivations
    outputs: float
    saved_outputs: float
    recomputing: frozenset[str]
    flops: float = 0.0


def _whole_head(
    plan: LayerPlan,
    state: PackedState,
    targets: tuple[Tensor, ...],
    dtype: torch.dtype,
    objective: Trainable,
    handed: _Handed,
) -> _Head:
    """Measure the last layer.

    If it takes images singly, none of its storages grows with their number, so the measurements of
    one and two images are compared.
    """
    if not objective.takes_images_singly:
        return _measured_head(plan, state, targets, dtype, objective, handed)
    plan = replace(plan, factory=partial(objective.fullest, plan.factory))

    def measured(count: int) -> _Head:
        entering, below = _narrowed(state, count), handed.narrowed(count)
        targets = objective.blank_sequence(count, torch.device("meta")).targets
        return _measured_head(plan, entering, targets, dtype, objective, below)

    one, two = measured(1), measured(2)
    return replace(
        one,
        activations=_line(one.activations, two.activations),
        outputs=(two.outputs - one.outputs) * _IMAGES,
        saved_outputs=(two.saved_outputs - one.saved_outputs) * _IMAGES,
        flops=(two.flops - one.flops) * _IMAGES,
    )


def _narrowed(state: PackedState, num_images: int) -> PackedState:
    """Return the state of the first of `_IMAGES` images; hidden states lead, `[s, b, h]`."""
    hidden, *carried = _leaves(state)
    parts = [_part(hidden, 1, num_images)]
    # Tensors that images share have one row.
    parts += [_part(each, 0, min(num_images, len(each))) for each in carried]
    return parts[0] if isinstance(state, Tensor) else tuple(parts)


def _line(one: LayerActivations, two: LayerActivations) -> LayerActivations:
    """Return the linear growth with the images, from the totals for one and for two."""

    def through(first: float, second: float) -> tuple[float, float]:
        return second - first, 2 * first - second

    saved, fixed = through(one.kept(_IMAGES), two.kept(_IMAGES))
    passes = (
        Growth((through(low.most(_IMAGES), high.most(_IMAGES)),))
        for low, high in ((one.forward, two.forward), (one.backward, two.backward))
    )
    return LayerActivations(saved, fixed, 0.0, *passes)


def _measured_head(
    plan: LayerPlan,
    state: PackedState,
    targets: tuple[Tensor, ...],
    dtype: torch.dtype,
    objective: Trainable,
    handed: _Handed,
) -> _Head:
    sizes: dict[int, int] = {}

    def score(head: nn.Module, entering: PackedState) -> Tensor:
        predictions: Predictions = head(entering)
        # Only in the first run, which determines `saved`.
        sizes.update(() if sizes else [(place_of(one), one.nbytes) for one in _leaves(predictions)])
        return objective.loss(predictions, targets)

    measured = _measured(plan, state, dtype, handed, score)
    saved = sum(sizes[place] for place in sizes.keys() & measured.saved)
    outputs, flops = sum(sizes.values()) / _IMAGES, 0.0
    tuned = finetuned_of(objective)
    # With the paper's own loss the workload includes the head.
    if tuned is not None and not tuned.settings.generative_weight:
        flops = _flops_of(plan, state, dtype, handed, score) / _IMAGES
    return _Head(measured.activations, outputs, saved / _IMAGES, measured.recomputing, flops)


def _flops_of(
    plan: LayerPlan,
    state: PackedState,
    dtype: torch.dtype,
    handed: _Handed,
    run: Callable[[nn.Module, Any], Any],
) -> float:
    """Return the operations of both passes."""
    layer = _built(plan, dtype)
    handed.box[:] = [_map(each, _leaf) for each in handed.found]
    with FlopCounterMode(display=False) as counter:
        run(layer, _map(state, _leaf)).backward()
    return float(counter.get_total_flops())


def _through(
    plans: Sequence[LayerPlan], state: PackedState, dtype: torch.dtype, handed: _Handed
) -> tuple[list[StackActivations], PackedState]:
    """Measure stacks and bridges; return the state above them."""
    stacks: list[StackActivations] = []
    for stack, group in itertools.groupby(plans, lambda plan: plan.stack):
        layers = list(group)
        if stack is None:
            bridge = []
            for plan in layers:
                measured = _measured(plan, state, dtype, handed)
                bridge.append(measured.activations)
                state = measured.output
            stacks[-1] = replace(stacks[-1], bridge=tuple(bridge))
            continue
        # A block's output has the form of its input, so running one of each kind is enough.
        kinds: dict[tuple[str, ...], _Measured] = {}
        for plan, count in alike_layers(layers):
            kinds[plan.variant] = last = _measured_kind(plan, count, state, dtype, handed)
            handed.found += count * last.handed
            state = last.output
        every = [kinds[plan.variant].activations for plan in layers]
        last = kinds[layers[-1].variant]
        if stack.work.num_read != stack.work.num_tokens:
            last = _measured(layers[-1], state, dtype, handed)
        lower = tuple(every[:-1]) if len(kinds) > 1 else ()
        stacks.append(StackActivations(every[0], last.activations, lower=lower))
        state = last.output
    return stacks, state


def _measured_kind(
    plan: LayerPlan, count: int, state: PackedState, dtype: torch.dtype, handed: _Handed
) -> _Measured:
    """Measure one of `count` equal blocks; above frozen layers, not the lowest if possible.

    The input of the lowest block has no gradient.
    """
    measured = _measured(plan, state, dtype, handed)
    enters, leaves = (_leaves(each)[0].requires_grad for each in (state, measured.output))
    if count > 1 and leaves and not enters:
        return _measured(plan, measured.output, dtype, handed)
    return measured


@dataclass(frozen=True)
class _Measured:
    """A layer's activations, its output, and the places of the tensors that it saves.

    `recomputing` has the values of `parallel.activation_checkpointing` that may change them, and
    `handed` what it hands to the last layer.
    """

    activations: LayerActivations
    output: PackedState
    saved: frozenset[int]
    recomputing: frozenset[str]
    handed: tuple[Any, ...] = ()


def _apply(layer: nn.Module, state: PackedState) -> PackedState:
    output: PackedState = layer(state)
    return output


def _measured(
    plan: LayerPlan,
    state: PackedState,
    dtype: torch.dtype,
    handed: _Handed,
    run: Callable[[nn.Module, Any], Any] = _apply,
) -> _Measured:
    """Run both passes of a layer, including what `run` adds."""
    layer, given = _built(plan, dtype), plan.handed is not None
    entering = _map(state, _leaf)
    hidden, *carried = _leaves(entering)

    def enter() -> None:
        handed.box[:] = [_map(each, _leaf) for each in handed.found] if given else []

    enter()
    # In a separate run: tensors passed to hooks are freed late.
    saved, _ = saved_tensors(partial(run, layer, entering), [layer])
    sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in saved.items()}
    own = tuple(_map(each, _blank) for each in handed.box)
    del saved, _
    enter()
    with _Moments() as live:
        live.add(place_of(hidden), hidden.nbytes)
        output = run(layer, entering)
        forward = live.growth()
        live.restart()
        outputs = [each for each in _leaves(output) if each.requires_grad]
        gradients = [torch.empty_like(each) for each in outputs]
        if outputs:
            torch.autograd.backward(outputs, gradients)
        del gradients
        backward = live.growth()
    handed.box.clear()
    shared = 0
    if plan.stack is not None:
        shared = sum(sizes.pop(place_of(each), 0) for each in carried)
    fixed = sum(size for size in sizes.values() if size % _IMAGES)
    return _Measured(
        LayerActivations(
            saved=(sum(sizes.values()) - fixed) / _IMAGES,
            fixed=fixed,
            shared=shared / _IMAGES,
            forward=forward,
            backward=backward,
        ),
        # Not a view of a larger storage, which only the layer above would keep.
        _map(output, _blank),
        frozenset(sizes),
        _recomputing(layer),
        own,
    )


def _recomputing(layer: nn.Module) -> frozenset[str]:
    """Return the kinds of activation checkpointing that may change how a layer runs."""
    modules = [*layer.modules()]
    if any(isinstance(module, Block) for module in modules):
        return frozenset({"selective", "full"})
    # Outside a block, no MLP is recomputed as a whole.
    return frozenset({"selective"} if any(isinstance(m, FeedForward) for m in modules) else ())


def _built(plan: LayerPlan, dtype: torch.dtype) -> nn.Module:
    """Build a layer on the meta device for this measurement."""
    with torch.device("meta"):
        layer = plan.build().to(dtype).train()
    for parameter in layer.parameters():
        # Drop gradients, which engines keep or reduce, and which are part of the states.
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    for module in layer.modules():
        if isinstance(module, Attention):
            # With hooks, so that it also applies to recomputation in the backward pass.
            flash = FlashAttention()
            module.register_forward_pre_hook(flash.begin)
            module.register_forward_hook(flash.end)
    return layer


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _leaves(state: PackedState) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def _map(state: PackedState, change: Callable[[Tensor], Tensor]) -> PackedState:
    return change(state) if isinstance(state, Tensor) else tuple(map(change, state))


class _Moments(LiveStorages):
    """Live storages, by whether they grow with the images."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = 0
        self.restart()

    def add(self, place: int, size: int) -> None:
        super().add(place, size)
        self.fixed += size if size % _IMAGES else 0

    def free(self, place: int) -> int:
        size = super().free(place)
        self.fixed -= size if size % _IMAGES else 0
        return size

    def restart(self) -> None:
        """Forget the moments, and start from the storages that are live now."""
        self._before = (self.num_bytes - self.fixed, self.fixed)
        self._moments: set[tuple[int, int]] = {(0, 0)}

    def record(self) -> None:
        """Record the live storages, unless both numbers were higher at another moment."""
        growing, fixed = self._before
        now = (self.num_bytes - self.fixed - growing, self.fixed - fixed)
        if not any(now[0] <= each and now[1] <= other for each, other in self._moments):
            below = {each for each in self._moments if each[0] <= now[0] and each[1] <= now[1]}
            self._moments = self._moments - below | {now}

    def growth(self) -> Growth:
        """Return the moments since the last start."""
        return Growth(tuple((each / _IMAGES, float(fixed)) for each, fixed in self._moments))
