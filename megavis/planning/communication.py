"""Bytes that a process sends per optimizer step, by purpose and link.

A collective over n processes sends (n - 1)/n of the tensor for an all-gather or a reduce-scatter,
and twice that for an all-reduce ("ZeRO", section 7; "Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM", section 3.2). A group that spans nodes is counted in two levels,
inside each node and between corresponding processes of the nodes, as NCCL's rings use all network
ports: each of the m processes in a node sends 1/m of the traffic between nodes.

DeepSpeed's behaviour was read in its source (0.19): ZeRO 1 and 2 all-reduce gradients instead of
reduce-scattering them, and ZeRO-2 does so after every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megavis.planning.layouts import Layout
from megavis.planning.shape import ModelShape, StackShape
from megavis.planning.states import (
    BUCKET,
    FLOAT32,
    MOST_GATHERED,
    bucket_of,
)

_ALL_REDUCE, _GATHER = 2.0, 1.0


@dataclass(frozen=True)
class Group:
    """Size of a process group, in total and per node."""

    size: int
    in_a_node: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the group spans."""
        return -(-self.size // self.in_a_node)

    def sent(self, size: float, factor: float) -> tuple[float, float]:
        """Return the bytes a process sends within and between nodes for `size` bytes."""
        inside = factor * size * (self.in_a_node - 1) / self.in_a_node
        nodes = self.num_nodes
        return inside, factor * size / self.in_a_node * (nodes - 1) / nodes

    def exchanged(self, size: float) -> tuple[float, float]:
        """Return the same for an all-to-all in which each process holds `size` bytes."""
        part = size / self.size
        return part * (self.in_a_node - 1), part * (self.size - self.in_a_node)


def tensor_group(layout: Layout, devices_per_node: int) -> Group:
    """Return the tensor-parallel group, which has consecutive ranks."""
    return Group(layout.tensor, min(layout.tensor, devices_per_node))


def group_apart(size: int, layout: Layout, devices_per_node: int) -> Group:
    """Return a group whose ranks are a tensor size apart: of a context, or of equal weights."""
    return Group(size, max(1, min(size, devices_per_node // layout.tensor)))


@dataclass(frozen=True)
class Transfer:
    """One kind of communication: purpose and collective, and bytes and calls of a process per step.

    Bytes are those sent inside the node and between nodes. A hidden transfer overlaps with
    computation. The passes of a micro-batch wait for a transfer in them, so pipeline bubbles grow
    with it.
    """

    kind: str
    inside: float
    between: float
    calls: float
    is_hidden: bool = False
    in_passes: bool = False

    def __add__(self, other: Transfer) -> Transfer:
        """Return the sum of two transfers of one kind."""
        return replace(
            self,
            inside=self.inside + other.inside,
            between=self.between + other.between,
            calls=self.calls + other.calls,
        )

    def part(self, share: float) -> Transfer:
        """Return a share of the transfer, in whole calls."""
        inside, between, calls = self.inside * share, self.between * share, self.calls * share
        return replace(self, inside=inside, between=between, calls=round(calls))


def transfers(shape: ModelShape, layout: Layout, devices_per_node: int) -> list[Transfer]:
    """Return the transfers of the process with the most parameters in an optimizer step."""
    found: list[Transfer] = []
    if layout.tensor > 1:
        found += _tensor_transfers(shape, layout, tensor_group(layout, devices_per_node))
    if layout.pipeline > 1:
        found += _pipeline_transfers(shape, layout, devices_per_node)
    if layout.context > 1:
        contexts = group_apart(layout.context, layout, devices_per_node)
        found += _context_transfers(shape, layout, contexts)
    if layout.replicas > 1:
        replicas = group_apart(layout.replicas, layout, devices_per_node)
        found += _replica_transfers(shape, layout, replicas)
    return found


@dataclass(frozen=True)
class BlockTraffic:
    """Tokens per image whose hidden states a block all-reduces, all-gathers and reduce-scatters.

    In its tensor group, in both passes: a number for each collective.
    """

    reduced: tuple[float, ...] = ()
    gathered: tuple[float, ...] = ()
    scattered: tuple[float, ...] = ()


def block_traffic(shape: StackShape, layout: Layout) -> BlockTraffic:
    """Count the collectives of a block for one image ("Reducing Activation Recomputation ...").

    In section 4.2 of that paper, attention and MLP have one collective before and one after, in
    each pass; Megatron gathers inputs that are kept sharded again in the backward pass.
    """
    own, crossed = _own_traffic(shape, layout), _crossed_traffic(shape, layout)
    return BlockTraffic(
        reduced=own.reduced + crossed.reduced,
        gathered=own.gathered + crossed.gathered,
        scattered=own.scattered + crossed.scattered,
    )


def _forward_passes(layout: Layout) -> int:
    return 1 + (layout.parallel.activation_checkpointing == "full")


def _crossed_traffic(shape: StackShape, layout: Layout) -> BlockTraffic:
    """Count the collectives around cross-attention to a memory, which is replicated."""
    work = shape.work
    if not work.num_memory:
        return BlockTraffic()
    tokens = work.num_tokens / shape.context_parts(layout)
    # Outputs, and in the backward pass gradients of the inputs of queries.
    own = (tokens,) * (_forward_passes(layout) + 1)
    # Gradients of the inputs of keys and values.
    memory = (float(work.num_memory),)
    if not shape.is_sequence_parallel(layout):
        return BlockTraffic(reduced=own + memory)
    return BlockTraffic(reduced=memory, gathered=own, scattered=own)


def _own_traffic(shape: StackShape, layout: Layout) -> BlockTraffic:
    """Count the collectives around self-attention and the MLP."""
    forward = 2 * _forward_passes(layout)
    tokens = (shape.work.num_tokens / shape.context_parts(layout),)
    if not shape.is_sequence_parallel(layout):
        return BlockTraffic(reduced=tokens * (forward + 2))
    # Tokens selected from the full sequence are kept, and not gathered again.
    backward = 3 if shape.multiplies_parts(layout) else 4
    return BlockTraffic(gathered=tokens * (forward + backward), scattered=tokens * (forward + 2))


def _tensor_transfers(shape: ModelShape, layout: Layout, group: Group) -> list[Transfer]:
    found: dict[str, Transfer] = {}
    for stack, blocks in shape.busiest_blocks(layout):
        block, micro_batches = block_traffic(stack, layout), layout.accumulation_steps
        numbers = stack.number_size * stack.hidden_size * layout.micro_batch_size * micro_batches
        for kind, tokens, factor in (
            ("tensor: all-reduce", block.reduced, _ALL_REDUCE),
            ("tensor: all-gather", block.gathered, _GATHER),
            ("tensor: reduce-scatter", block.scattered, _GATHER),
        ):
            if tokens:
                sent = group.sent(numbers * blocks * sum(tokens), factor)
                own = Transfer(kind, *sent, blocks * micro_batches * len(tokens))
                found[kind] = own + found[kind] if kind in found else own
    return list(found.values())


def _context_transfers(shape: ModelShape, layout: Layout, group: Group) -> list[Transfer]:
    """Count the all-to-alls of a block: queries, keys and values in one, outputs in another."""
    images = layout.micro_batch_size * layout.accumulation_steps
    total = Transfer("context: all-to-all", 0.0, 0.0, 0.0)
    for stack, blocks in shape.busiest_blocks(layout):
        if stack.context_parts(layout) == 1:
            continue
        passes = (1 + _forward_passes(layout)) * blocks
        held = 4 * stack.hidden_size * stack.work.num_tokens / stack.parts(layout)
        sent = group.exchanged(stack.number_size * held * images * passes)
        total += Transfer(total.kind, *sent, 2 * passes * layout.accumulation_steps)
    return [total]


def _pipeline_transfers(shape: ModelShape, layout: Layout, devices_per_node: int) -> list[Transfer]:
    """Count hidden states and their gradients, which DeepSpeed splits over the tensor group."""
    images = layout.micro_batch_size * layout.accumulation_steps
    # The largest hidden states of all stacks.
    hidden = max(
        stack.number_size
        * (
            stack.hidden_size * stack.work.num_memory
            + (stack.hidden_size * stack.work.num_tokens + stack.num_passing)
            / stack.context_parts(layout)
        )
        * images
        for stack in shape.stacks
    )
    sent, calls = 2 * hidden / layout.tensor, 2.0 * layout.accumulation_steps
    is_inside = layout.num_processes <= devices_per_node
    found = [
        Transfer(
            "pipeline: point to point",
            inside=sent if is_inside else 0.0,
            between=0.0 if is_inside else sent,
            calls=calls,
        )
    ]
    if layout.tensor > 1 and not layout.parallel.sequence_parallel:
        inside, between = tensor_group(layout, devices_per_node).sent(2 * hidden, _GATHER)
        found.append(Transfer("pipeline: all-gather", inside, between, calls))
    return found


def _replica_transfers(shape: ModelShape, layout: Layout, group: Group) -> list[Transfer]:
    held, trained = (
        max(layers.held(layout.pipeline, layout.tensor)) for layers in (shape.layers, shape.trained)
    )
    weights, times = shape.number_size * held, layout.accumulation_steps
    gradients = shape.gradient_size * trained
    buckets = trained // bucket_of(shape, layout) + 1
    if layout.zero_stage == 0:
        return [_sent(group, "gradients: all-reduce", FLOAT32 * trained, _ALL_REDUCE, buckets)]
    if layout.zero_stage < 3:
        often = times if layout.zero_stage == 2 else 1
        size, calls = gradients * often, buckets * often
        reduced = _sent(group, "gradients: all-reduce", size, _ALL_REDUCE, calls)
        in_passes = layout.zero_stage == 2 and layout.pipeline > 1
        return [
            replace(reduced, in_passes=in_passes),
            _sent(
                group,
                "ZeRO: all-gather of weights",
                shape.number_size * trained,
                _GATHER,
                trained // BUCKET + 1,
            ),
        ]
    # DeepSpeed keeps gathered weights from the forward to the backward pass up to a limit; not with
    # pipeline stages (`training/zero_pipeline.py`).
    alone = layout.pipeline == 1
    passes = times * (1 if alone and 2 * held <= MOST_GATHERED else 2)
    blocks = sum(shape.layers.busiest(layout.pipeline).blocks)
    near = layout.parallel.hierarchical_partition_size
    far_passes = passes if near == 1 else 1
    gathers = [(group, "ZeRO: all-gather of weights", far_passes)]
    if passes > far_passes:
        nearby = Group(near, min(near, group.in_a_node))
        gathers.append((nearby, "ZeRO: all-gather of copied weights", passes - far_passes))
    # Weights are gathered ahead, but a stage waits for the first layer of each pass.
    waited = 0.0 if alone else 1 / blocks
    found = []
    for within, kind, count in gathers:
        whole = _sent(within, kind, weights * count, _GATHER, (blocks + 2) * count)
        found += [
            replace(whole.part(1 - waited), is_hidden=True),
            replace(whole.part(waited), kind=f"{kind}, first layer", in_passes=True),
        ]
    reduced = _sent(group, "ZeRO: reduce-scatter", gradients * times, _GATHER, buckets * times)
    found.append(replace(reduced, is_hidden=alone, in_passes=not alone))
    return [each for each in found if each.calls]


def _sent(group: Group, kind: str, size: float, factor: float, calls: float) -> Transfer:
    return Transfer(kind, *group.sent(size, factor), calls)
