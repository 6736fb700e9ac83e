"""Planned communication and parameters against layers on the meta device, and by hand."""

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from small_configs import SMALL_ENCODER
from torch.utils._python_dispatch import TorchDispatchMode

from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.model import attention, core, feed_forward
from megavis.model.block_layers import block_layers
from megavis.model.kernels import plain_kernels
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_virtual_context
from megavis.planning.communication import Transfer, transfers
from megavis.planning.fp8_memory import fp8_difference
from megavis.planning.layouts import Layout
from megavis.planning.measured_activations import activations_of
from megavis.planning.meta_device import tensors_in
from megavis.planning.parameters import Layers, count_parameters, stage_bounds
from megavis.planning.shape import ModelShape, shape_of

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"
IMAGES = 2
TWO = ["model.num_layers=2"]
STREAMS = [*TWO, "objective.two_streams=true", "objective.loss=mse", "objective.decoder=linear"]
CROSS = [*SMALL_ENCODER, "training.precision=float32"]
TENSOR, CONTEXT, SPLIT, FULL = (
    f"parallel.{key}"
    for key in (
        "tensor_model_parallel_size=2",
        "context_parallel_size=2",
        "sequence_parallel=true",
        "activation_checkpointing=full",
    )
)
KINDS = {
    "allreduce_": ("tensor: all-reduce", 2.0),
    "_allgather_base_": ("tensor: all-gather", 1.0),
    "_reduce_scatter_base_": ("tensor: reduce-scatter", 1.0),
    "alltoall_base_": ("context: all-to-all", 1.0),
}
"""Name of the plan by torch's operator, and how often the tensor is sent, but for a share of it."""


@contextmanager
def process_of(parallel):
    """A context of one process of a job with one replica, which sends nothing."""
    context = open_virtual_context(0, parallel.model_parallel_size, parallel, device="meta")
    try:
        yield context
    finally:
        close_context()


class Collectives(TorchDispatchMode):
    """Lists the collectives of a computation, with the bytes of the whole tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            # Output and input: the larger one of a gather or scatter is the whole.
            size = max(tensor.nbytes for tensor in tensors_in(args))
            self.found.append((operation.__name__.removesuffix(".default"), size))
        return operation(*args, **(kwargs or {}))


def leaves(state):
    return (state,) if isinstance(state, torch.Tensor) else state


def run_twice(layer, state):
    """Run both passes of a layer; return its output and its collectives."""
    entering = tuple(each.detach().requires_grad_(each.requires_grad) for each in leaves(state))
    with Collectives() as counter:
        output = layer(entering[0] if isinstance(state, torch.Tensor) else entering)
        ends = [each for each in leaves(output) if each.requires_grad]
        torch.autograd.backward(ends, [torch.empty_like(each) for each in ends])
    return output, counter.found


def blocks_of(objective):
    """Return the collectives of all blocks; those of a stack are alike, so one of each is run."""
    state, above = objective.blank_sequence(IMAGES, torch.device("meta")).inputs, None
    found = []
    with plain_kernels():
        for plan in objective.layer_plans()[:-1]:
            if plan.stack is None or plan.stack is not above:
                with torch.device("meta"):
                    layer = plan.build().train()
                state, sent = run_twice(layer, state)
            if plan.stack is not None:
                found += sent
            above = plan.stack
    return found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("igpt/demo", [*TWO, TENSOR]),
        ("igpt/demo", [*TWO, TENSOR, SPLIT]),
        ("igpt/demo", [*TWO, TENSOR, SPLIT, FULL]),
        ("igpt/demo", [*TWO, CONTEXT]),
        # Tokens are selected from the whole sequence, which is kept.
        ("darl/demo", [*STREAMS, TENSOR, SPLIT]),
        ("darl/demo", [*STREAMS, TENSOR, CONTEXT, FULL]),
        # Cross-attention to a memory that is not split, and a second stack.
        ("givt/encoder_decoder", [*CROSS, TENSOR]),
        ("givt/encoder_decoder", [*CROSS, TENSOR, CONTEXT, SPLIT]),
    ],
)
def test_collectives_of_blocks_are_those_of_the_layers(name, words):
    config = load_config(PRESETS / f"{name}.yaml", words).config
    config = config.model_copy(update={"model": config.model.without_dropout()})
    parallel = config.parallel
    with process_of(parallel) as context:
        objective = build_objective(config, context)
        found, shape = blocks_of(objective), shape_of(objective, {})
    expected = defaultdict(lambda: [0.0, 0.0])
    for operation, size in found:
        kind, factor = KINDS[operation]
        # Half of it stays on each of two processes.
        expected[kind][0] += factor * size / 2
        expected[kind][1] += 1
    planned = transfers(shape, Layout(parallel, 1, IMAGES, 1), 8)
    of_blocks = {each.kind: each for each in planned if each.kind in dict(KINDS.values())}
    assert {kind: [each.inside, each.calls] for kind, each in of_blocks.items()} == expected
    assert not any(each.between for each in planned)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    config = load_config(PRESETS / "igpt/m_32.yaml").config
    with process_of(ParallelConfig()) as context:
        return shape_of(build_objective(config, context), {})


def planned_for(shape, devices_per_node=8, micro=1, accumulation=1, data=1, **keys):
    layout = Layout(ParallelConfig(**keys), data, micro, accumulation)
    return {each.kind: each for each in transfers(shape, layout, devices_per_node)}


def test_stages_send_hidden_states_and_their_gradients(shape):
    """iGPT-M in float32: 1024 tokens of 1024 numbers, in four micro-batches of three images."""
    hidden, sizes = 4 * 3 * 4 * 1024 * 1024, {"micro": 3, "accumulation": 4, "zero_stage": 0}
    name = "pipeline: point to point"
    two = {**sizes, "pipeline_model_parallel_size": 2}
    assert planned_for(shape, **two) == {name: Transfer(name, 2 * hidden, 0.0, 8)}
    assert planned_for(shape, 1, **two) == {name: Transfer(name, 0.0, 2 * hidden, 8)}
    # Each process of a tensor group sends its part, and then they gather the whole.
    both = planned_for(shape, **two, tensor_model_parallel_size=4)
    gather = "pipeline: all-gather"
    assert both[name] == Transfer(name, 2 * hidden / 4, 0.0, 8)
    assert both[gather] == Transfer(gather, 2 * hidden * 3 / 4, 0.0, 8)
    split = planned_for(shape, **two, tensor_model_parallel_size=4, sequence_parallel=True)
    assert split[name] == both[name]
    assert gather not in split


def test_buckets_of_gradients_and_weights(shape):
    """455 M parameters: one of DeepSpeed's buckets, or 36 of a block's 12 · 1024² and a rest."""
    gradients, weights = "gradients: all-reduce", "ZeRO: all-gather of weights"

    def calls(**keys):
        planned = planned_for(shape, data=8, accumulation=4, **keys)
        return {kind: each.calls for kind, each in planned.items()}

    assert calls(zero_stage=0) == {gradients: 1}
    assert calls(zero_stage=1) == {gradients: 37, weights: 1}
    assert calls(zero_stage=2) == {gradients: 4 * 37, weights: 1}
    # A gather for each block, the first layer and the last.
    assert calls(zero_stage=3) == {"ZeRO: reduce-scatter": 4 * 37, weights: 4 * 38}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("igpt/demo", ["model.num_layers=4"]),
        # A bridge and a decoder, and an encoder in the first layer: blocks that differ.
        ("mae/tiny", ["model.num_layers=4", "objective.decoder.num_layers=3"]),
        ("givt/encoder_decoder", [*CROSS, "model.num_layers=5"]),
    ],
)
def test_parameters_of_stages_are_those_of_their_layers(name, words):
    """As the engine divides them, each layer built as one process of a tensor group."""
    config = load_config(PRESETS / f"{name}.yaml", words).config
    layers = None
    for size in (1, 2):
        parallel = ParallelConfig(tensor_model_parallel_size=size)
        with process_of(parallel) as context:
            own = config.model_copy(update={"parallel": parallel})
            objective = build_objective(own, context)
            plans = objective.layer_plans()
            layers = layers or Layers.of(count_parameters(objective), plans)
            with torch.device("meta"):
                built = [plan.build() for plan in plans]
        numbers = [sum(each.numel() for each in layer.parameters()) for layer in built]
        assert layers.largest(size) == max(numbers)
        for num_stages in (1, 2, 4):
            bounds = stage_bounds(plans, num_stages)
            expected = [sum(numbers[start:end]) for start, end in pairwise(bounds)]
            assert layers.held(num_stages, size) == tuple(expected)
        if size == 1:
            assert layers.total == sum(numbers)


class InFp8(torch.autograd.Function):
    """A product that saves what Transformer Engine's saves: FP8 copies of input and weight."""

    @staticmethod
    def forward(ctx, inputs, weight):
        small = torch.float8_e4m3fn
        ctx.save_for_backward(inputs.to(small), weight.to(small), weight.t().to(small))
        return torch.nn.functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight, _ = ctx.saved_tensors
        return gradient.new_empty(inputs.shape), gradient.new_empty(weight.shape)


def in_fp8(layers):
    """Return a library's layers for one process, with products in FP8."""

    class Column(layers.column_parallel):
        def forward(self, hidden):
            product = InFp8.apply(hidden, self.weight)
            return product if self.bias is None else product + self.bias, None

    class Whole(layers.query_key_value):
        def forward(self, *inputs):
            if len(inputs) > 1:
                return super().forward(*inputs)
            return InFp8.apply(*inputs, self.weight), None

    class Row(layers.row_parallel):
        def forward(self, hidden):
            return InFp8.apply(hidden, self.weight), self.bias

    return replace(
        layers,
        column_parallel=Column,
        query_key_value=Whole,
        row_parallel=Row,
        multiplies_parts=False,
    )


@pytest.mark.parametrize("kind", ["none", "selective"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("igpt/demo", TWO),
        ("igpt/demo", [*TWO, "model.mlp_dropout=0.1"]),
        ("darl/demo", STREAMS),
        # Not rotated: two streams, and keys and values of some tokens.
        ("gvp/demo", TWO),
        ("mp3/demo", TWO),
        ("givt/encoder_decoder", CROSS),
    ],
)
def test_memory_of_blocks_in_fp8(monkeypatch, name, words, kind):
    """The difference between blocks whose products save copies in FP8 and those that do not."""
    more = ["training.precision=bf16", "parallel.zero_stage=1"]
    more += [f"parallel.activation_checkpointing={kind}"]
    config = load_config(PRESETS / f"{name}.yaml", [*words, *more]).config
    layout, found = Layout(config.parallel, 1, 1, 1), []
    with process_of(config.parallel) as context:
        shape = shape_of(build_objective(config, context), {})
        for change in (lambda layers: layers, in_fp8):
            layers = change(block_layers())
            for module in (core, attention, feed_forward):
                monkeypatch.setattr(module, "block_layers", lambda layers=layers: layers)
            found.append(activations_of(build_objective(config, context)).stacks)
    for stack, half, mixed in zip(shape.stacks, *found, strict=True):
        for is_last, one, other in (
            (False, half.block, mixed.block),
            (True, half.last_block, mixed.last_block),
        ):
            planned = fp8_difference(stack, layout, is_last=is_last)
            assert other.saved - one.saved == planned.saved, is_last
            assert other.fixed - one.fixed == planned.fixed
