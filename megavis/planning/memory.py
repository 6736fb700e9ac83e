"""Memory of one process in training: states, activations, and the buffers of DeepSpeed.

States: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 3 and
figure 1, with float32 gradients as megavis accumulates them. Activations: "Reducing Activation
Recomputation in Large Transformer Models", section 4, counted anew for megavis's own block, whose
norms work in float32 and whose attention keeps no matrix of scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.config.schema import ParallelConfig
from megavis.planning.layouts import Layout
from megavis.planning.parameters import Layers
from megavis.planning.shape import ModelShape, number_size

# Bytes a parameter: Adam's two moments; a gradient, a master weight or its moving average.
_ADAM, _FLOAT32 = 8, 4
_AROUND_ACTIVATION = 2
"""Tensors of the MLP's width: what its activation function is of, and what it gives."""
# DeepSpeed's defaults, in numbers: a bucket of gradients that is reduced at once, and weights that
# ZeRO-3 keeps whole at a time.
BUCKET, MOST_GATHERED = 500_000_000, 1_000_000_000


@dataclass(frozen=True)
class StateMemory:
    """Bytes on one process before it has seen an image; what is offloaded counts nothing.

    Attributes:
        weights: in the compute precision.
        gradients: in float32; in bf16 under ZeRO-1 also those of the weights themselves, which
            DeepSpeed's optimizer for that case sets to zero and does not free.
        optimizer: Adam's moments, and under ZeRO 1 to 3 the float32 master weights, which DeepSpeed
            keeps beside the weights also where it computes in float32.
        average: the moving average of the weights (`optimizer.ema_decay`), in float32, which is
            split and offloaded with the optimizer's states.
        gathered: under ZeRO-3, the largest layer, whole while it is used. This is the least:
            DeepSpeed keeps up to 10⁹ parameters whole where it can, to gather them less often.
    """

    weights: float
    gradients: float
    optimizer: float
    average: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.average + self.gathered


def state_memory(
    num_parameters: float,
    largest_layer: float,
    *,
    parallel: ParallelConfig,
    precision: str,
    data_size: int,
    keeps_average: bool,
) -> StateMemory:
    """Return what a process holds.

    Args:
        num_parameters: in this process's slice of its stage, whole over the data-parallel group.
        largest_layer: parameters of its largest layer, likewise.
        parallel: the layout.
        precision: `float32`, `bf16` or `fp16`.
        data_size: data-parallel size.
        keeps_average: a moving average of the weights is kept.
    """
    stage, size = parallel.zero_stage, number_size(precision)

    def held(from_stage: int) -> float:
        """Parameters of which this process holds what ZeRO splits from that stage on."""
        return num_parameters / (data_size if stage >= from_stage else 1)

    optimizer = _ADAM + (_FLOAT32 if stage else 0)
    own = held(1) if parallel.offload_optimizer == "none" else 0.0
    return StateMemory(
        weights=held(3) * size if parallel.offload_parameters == "none" else 0.0,
        gradients=held(2) * (_FLOAT32 + size * _keeps_half_gradients(stage, precision)),
        optimizer=own * optimizer,
        average=own * _FLOAT32 * keeps_average,
        gathered=largest_layer * size if stage == 3 else 0.0,
    )


def _keeps_half_gradients(zero_stage: int, precision: str) -> bool:
    return zero_stage == 1 and precision == "bf16"


def parameters_held(layers: Layers, layout: Layout, stage: int = 0) -> float:
    """Return the parameters of a pipeline stage's process, whole over its data-parallel group."""
    tensor = layout.tensor
    held = layout.blocks_of_a_stage(layers.num_blocks) * layers.block.held(tensor)
    if stage == 0:
        held += layers.first.held(tensor)
    if stage == layout.pipeline - 1:
        held += layers.last.held(tensor)
    return held


def states_of(
    layers: Layers, layout: Layout, stage: int, *, precision: str, keeps_average: bool
) -> StateMemory:
    """Return what a process of a pipeline stage holds before it has seen an image."""
    return state_memory(
        parameters_held(layers, layout, stage),
        layers.largest(layout.tensor),
        parallel=layout.parallel,
        precision=precision,
        data_size=layout.data,
        keeps_average=keeps_average,
    )


def fullest_states(
    layers: Layers, layout: Layout, *, precision: str, keeps_average: bool
) -> StateMemory:
    """Return it for the stage that holds most: the first or the last."""
    states = (
        states_of(layers, layout, stage, precision=precision, keeps_average=keeps_average)
        for stage in (0, layout.pipeline - 1)
    )
    return max(states, key=lambda memory: memory.total)


@dataclass(frozen=True)
class BlockActivations:
    """Bytes that a block keeps for the backward pass, for one image."""

    norms: float
    attention: float
    mlp: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.norms + self.attention + self.mlp


def block_activations(
    shape: ModelShape, layout: Layout, *, is_last: bool = False
) -> BlockActivations:
    """Return what a block keeps where nothing is recomputed but, by `selective`, attention.

    Args:
        shape: the model.
        layout: tensor and sequence parallelism divide, each what it splits.
        is_last: the last block of the model, which goes on with the tokens that are read.
    """
    work, width = shape.work, shape.hidden_size
    read = work.num_read if is_last else work.num_tokens
    numbers = shape.number_size * width
    # The input, and of each token the mean (where it is subtracted) and the deviation.
    norm = 4 * width + 4 * (1 + shape.is_layer_norm)
    dropped = shape.residual_dropouts * width * read
    return BlockActivations(
        norms=((work.num_tokens + read) * norm + dropped + numbers * read) / layout.token_parts,
        attention=_attention_activations(shape, layout, read),
        mlp=read
        * shape.mlp_size
        * (shape.number_size * _AROUND_ACTIVATION + shape.mlp_dropout)
        / layout.tensor,
    )


def _attention_activations(shape: ModelShape, layout: Layout, read: int) -> float:
    """Return the bytes of an image: inputs of the projections, and what the kernel keeps."""
    work, width, size = shape.work, shape.hidden_size, shape.number_size
    chooses = shape.visibility in ("two_stream", "context")
    # Where tokens are chosen, they are chosen from the whole sequence.
    inputs = work.num_tokens / (1 if chooses else layout.token_parts)
    if shape.visibility == "context":
        inputs += work.num_seen
    # Queries, keys and values, what the output matrix takes; a rotated key beside the first one.
    split = 2 * read + (2 + shape.is_rotary) * work.num_seen
    kernel = 0.0
    if layout.parallel.activation_checkpointing != "selective":
        # What is turned or masked after the kernel is copied for the output matrix.
        copies = shape.is_rotary or shape.visibility == "two_stream"
        kernel = read * (size * width * copies + 4 * shape.num_heads) / layout.tensor
        if shape.visibility == "two_stream":
            kernel += read * (size * work.num_seen + 1)
    # Sines and cosines in float32, half as many as a head has channels, for queries and for keys.
    angles = shape.is_rotary * 4 * (width // shape.num_heads) * (read + work.num_seen)
    return size * width * (inputs + split / layout.tensor) + kernel + angles


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the micro-batches that a process has under way.

    Attributes:
        embedding: saved in the first layer, where this process has it.
        block: saved in each block but the last.
        last_block: saved in the last of this process's blocks.
        head: saved in the last layer and the loss, where this process has them.
        num_blocks: on this process.
        in_flight: micro-batches whose backward pass is still to come.
        recomputed: one block's, or one attention's, while it is recomputed.
        transit: hidden states that came from, and go to, neighbouring stages.
        backward: gradients inside one block while its backward pass runs.
    """

    embedding: float
    block: float
    last_block: float
    head: float
    num_blocks: int
    in_flight: int
    recomputed: float
    transit: float
    backward: float

    @property
    def saved(self) -> float:
        """What autograd saves, in all micro-batches under way."""
        blocks = (self.num_blocks - 1) * self.block + self.last_block
        return self.in_flight * (self.embedding + blocks + self.head)

    @property
    def total(self) -> float:
        """The most at once."""
        return self.saved + self.recomputed + self.transit + self.backward


def activation_memory(shape: ModelShape, layout: Layout, stage: int = 0) -> ActivationMemory:
    """Return what a process of a pipeline stage keeps, at the worst moment of a step."""
    images, work = layout.micro_batch_size, shape.work
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    block = block_activations(shape, layout)
    last = block_activations(shape, layout, is_last=is_last)
    checkpointing = layout.parallel.activation_checkpointing
    hidden = shape.number_size * shape.hidden_size * work.num_tokens / layout.token_parts
    kept, kept_last, recomputed = block.total, last.total, 0.0
    if checkpointing == "full":
        kept = kept_last = hidden
        recomputed = block.total
    elif checkpointing == "selective":
        recomputed = shape.number_size * shape.hidden_size * work.num_tokens / layout.tensor
    # One forward, one backward: a stage has as many under way as stages follow, and its own.
    in_flight = min(layout.accumulation_steps, layout.pipeline - stage)
    return ActivationMemory(
        embedding=images * shape.embedding_bytes * is_first,
        block=images * kept,
        last_block=images * kept_last,
        head=images * shape.head_bytes * is_last,
        num_blocks=layout.blocks_of_a_stage(shape.num_layers),
        in_flight=in_flight,
        recomputed=images * recomputed,
        transit=images * 2 * hidden * in_flight * (layout.pipeline > 1),
        backward=images * work.num_tokens * _backward(shape, layout),
    )


def _backward(shape: ModelShape, layout: Layout) -> float:
    """Return the bytes a token of gradients in the MLP, and in float32 in a norm."""
    inside = shape.number_size * shape.mlp_size * _AROUND_ACTIVATION / layout.tensor
    return inside + 2 * _FLOAT32 * shape.hidden_size / layout.token_parts


@dataclass(frozen=True)
class RankMemory:
    """Everything that the fullest process holds, in bytes.

    Attributes:
        states: weights, gradients, optimizer.
        activations: of the micro-batches under way.
        buffers: DeepSpeed's bucket of gradients, weights that ZeRO-3 keeps whole beyond the
            largest layer, and Megatron's buffer for sequences that it gathers.
        stage: the pipeline stage that holds most.
    """

    states: StateMemory
    activations: ActivationMemory
    buffers: float
    stage: int

    @property
    def total(self) -> float:
        """All of them."""
        return self.states.total + self.activations.total + self.buffers


def rank_memory(shape: ModelShape, layout: Layout) -> RankMemory:
    """Return the memory of the process that needs most: of the first stage or the last."""
    stages = {0, layout.pipeline - 1}
    return max((_memory_of(shape, layout, stage) for stage in stages), key=lambda m: m.total)


def _memory_of(shape: ModelShape, layout: Layout, stage: int) -> RankMemory:
    return RankMemory(
        states=states_of(
            shape.layers,
            layout,
            stage,
            precision=shape.precision,
            keeps_average=shape.keeps_average,
        ),
        activations=activation_memory(shape, layout, stage),
        buffers=_buffers(shape, layout, stage),
        stage=stage,
    )


def _buffers(shape: ModelShape, layout: Layout, stage: int) -> float:
    held = parameters_held(shape.layers, layout, stage)
    tokens = layout.micro_batch_size * shape.work.num_tokens
    # Megatron gathers the inputs of a split sequence into one buffer that all layers share.
    whole = shape.number_size * shape.hidden_size * tokens * (layout.token_parts > 1)
    half = _keeps_half_gradients(layout.zero_stage, shape.precision)
    if layout.zero_stage == 0 or half:
        # Gradients are flattened, a bucket at a time, where there is someone to share them with.
        flat = _FLOAT32 + shape.number_size * half
        return whole + min(held, BUCKET) * flat * (layout.data > 1)
    gathered = 0.0
    if layout.zero_stage == 3:
        gathered = max(0.0, min(held, MOST_GATHERED) - shape.layers.largest(layout.tensor))
    return whole + (BUCKET + gathered) * shape.number_size
