"""Planning formulas against torch's FLOP counter, autograd's saved tensors and hand arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_configs import SMALL_ENCODER
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.model.stack import LayerStack, stacks_of
from megavis.papers import build_objective
from megavis.planning.activation_memory import activation_memory
from megavis.planning.communication import Group, group_apart, transfers
from megavis.planning.devices import Cluster, open_device
from megavis.planning.host_time import MILLISECONDS
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.measured_activations import activations_of
from megavis.planning.meta_device import num_bytes, saved_tensors
from megavis.planning.parameters import LayerParameters, Layers, StackParameters
from megavis.planning.plan import plan_layout
from megavis.planning.shape import shape_of
from megavis.planning.states import bucket_of, parameters_held, rank_memory, states_of
from megavis.planning.step_time import bubble_fraction

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"
IMAGES = 2
HALF = ["training.precision=bf16", "parallel.zero_stage=1"]
FULL = "parallel.activation_checkpointing=full"
NARROW = ["objective.encoder_hidden_size=48", "objective.encoder_num_attention_heads=4"]


def build(context, name, *words):
    """Build a preset without dropout, which on a CPU would save attention matrices."""
    config = load_config(PRESETS / f"{name}.yaml", words).config
    config = config.model_copy(update={"model": config.model.without_dropout()})
    objective = build_objective(config, context)
    if "encoder" in objective.condition.roles:
        # Read latents directly: the frozen VAE is counted apart.
        shape = objective.reads.shape
        objective.reads.of = lambda samples, index=None: samples.new_zeros(
            len(samples), *shape, dtype=torch.float32
        )
    return objective


def measured(objective):
    """Return the objective's shape for its config's layout on one process."""
    return shape_of(objective, {layout_key(objective.config.parallel): activations_of(objective)})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("igpt/demo", []),
        ("igpt/demo", [*HALF, "parallel.activation_checkpointing=selective"]),
        ("darl/demo", [*HALF, "objective.loss=mse", "objective.decoder=linear"]),
        ("gvp/demo", HALF),
        ("gvp/demo", ["parallel.activation_checkpointing=selective"]),
        ("mp3/demo", []),
        ("givt/demo", [FULL]),
        # Decoders in the head, a second stack, and encoders of equal and different width.
        ("darl/demo", []),
        ("darl/demo", [FULL]),
        ("darl/demo", [*HALF, "objective.loss=mse", "objective.decoder=mlp"]),
        ("mae/tiny", []),
        ("mae/tiny", [*HALF, "parallel.activation_checkpointing=selective", "data.image_size=64"]),
        ("givt/encoder_decoder", [*SMALL_ENCODER, "training.precision=float32"]),
        ("givt/encoder_decoder", [*SMALL_ENCODER, "parallel.activation_checkpointing=selective"]),
        ("givt/encoder_decoder", [*SMALL_ENCODER, FULL]),
        ("givt/encoder_decoder", [*SMALL_ENCODER, "training.precision=float32", *NARROW]),
    ],
)
def test_planned_activations_match_autograd(context, name, words):
    objective = build(context, name, "model.num_layers=3", *words)
    shape, dtype = measured(objective), torch.float32
    if objective.config.training.precision == "bf16":
        dtype = torch.bfloat16
    stack = LayerStack(objective.layer_plans(), objective.loss).to(dtype).train()
    sequence = objective.blank_sequence(IMAGES, torch.device("cpu"))
    found, _ = saved_tensors(lambda: stack(sequence.inputs, sequence.targets), [stack])
    layout = Layout(objective.config.parallel, 1, IMAGES, 1)
    planned = activation_memory(shape, layout)
    assert planned.saved == pytest.approx(num_bytes(found), rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "igpt/xl_64",
        "igpt/l_32_bert",
        "givt/causal_large",
        "givt/maskgit",
        "darl/vit_h14_mse",
        "darl/vit_h14_diff",
        "gvp/vit_b_p2d",
        "mp3/vit_b_imagenet",
        "mae/vit_b16",
        "aim/vit_600m",
        "givt/encoder_decoder",
    ],
)
def test_flops_match_torch_flop_counter(context, name):
    objective = build(context, name, "model.num_layers=12")
    meta, plans = torch.device("meta"), objective.layer_plans()
    with meta:
        layers = [plan.build() for plan in plans]
    state = objective.blank_sequence(IMAGES, meta).inputs
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for layer in layers:
            state = layer(state)
    work, model = objective.workload(), objective.config.model
    # torch also counts the scores that causal attention skips; no other attention skips any.
    (kind,) = {each.core.visibility_kind for each in stacks_of(plans) if each.work == work}
    assert (work.mean_visible < work.num_visible) == (kind == "causal")
    queries = (model.num_layers - 1) * work.num_tokens + work.num_read
    left_out = 4 * model.hidden_size * (work.num_visible - work.mean_visible) * queries
    planned = objective.flops_per_image() / 3 + left_out
    assert planned == pytest.approx(counter.get_total_flops() / IMAGES, rel=0.02)


@pytest.fixture(scope="module")
def shape(context):
    return measured(build(context, "igpt/m_32"))


def layout_of(data=1, micro=1, accumulation=1, **keys):
    return Layout(ParallelConfig(**keys), data, micro, accumulation)


def test_context_parallel_bytes(shape):
    layout = layout_of(accumulation=2, micro=3, context_parallel_size=4, zero_stage=0)
    stack = shape.stacks[0]
    found = {transfer.kind: transfer for transfer in transfers(shape, layout, 2)}
    # Each process holds a quarter of queries, keys, values and outputs, and keeps a quarter of
    # that; of three other processes one is in its node. Forward and backward pass, two
    # micro-batches of three images.
    held = 4 * 4 * stack.hidden_size * stack.work.num_tokens / 4
    sent = held * 2 * 2 * 3 * stack.num_layers
    traded = found["context: all-to-all"]
    assert (traded.inside, traded.between) == pytest.approx((sent / 4, sent / 2))
    assert traded.calls == 2 * 2 * 2 * stack.num_layers
    # Gradients are summed over the context group too.
    assert found["gradients: all-reduce"].between > 0


def test_stage_holds_one_micro_batch_per_remaining_stage(shape):
    layout = layout_of(accumulation=8, pipeline_model_parallel_size=4)
    assert [activation_memory(shape, layout, stage).in_flight for stage in range(4)] == [4, 3, 2, 1]
    few = replace(layout, accumulation_steps=2)
    assert activation_memory(shape, few).in_flight == 2
    # Narayanan et al., section 2.2: (p - 1) / m.
    assert bubble_fraction(4, 8) == 3 / 8


def test_all_reduce_bytes_by_link():
    # One node of 8: 2 · 7/8 of the tensor. Two nodes: each process sends 1/8 across nodes.
    assert Group(8, 8).sent(800.0, 2.0) == (1400.0, 0.0)
    assert Group(16, 8).sent(800.0, 2.0) == (1400.0, 100.0)
    assert Group(4, 1).sent(800.0, 1.0) == (0.0, 600.0)
    layout = layout_of(data=16, tensor_model_parallel_size=4)
    assert group_apart(layout.replicas, layout, 8) == Group(16, 2)


def test_data_parallel_communication_by_zero_stage(shape):
    number = shape.layers.total

    def sent(**keys):
        found = transfers(shape, layout_of(data=8, accumulation=4, **keys), 8)
        return {transfer.kind: transfer.inside / number * 8 / 7 for transfer in found}

    # Float32; ZeRO-1 reduces once a step, ZeRO-2 and 3 after each of four micro-batches.
    assert sent(zero_stage=0) == pytest.approx({"gradients: all-reduce": 8})
    gather = "ZeRO: all-gather of weights"
    assert sent(zero_stage=1) == pytest.approx({"gradients: all-reduce": 8, gather: 4})
    assert sent(zero_stage=2) == pytest.approx({"gradients: all-reduce": 32, gather: 4})
    # 455 M parameters stay gathered from forward to backward: one gather each.
    assert sent(zero_stage=3) == pytest.approx({gather: 16, "ZeRO: reduce-scatter": 16})


def test_stages_wait_for_gradients_and_first_layers_in_every_pass(shape):
    """With stages nothing stays gathered, and bubbles grow with all that passes wait for."""
    staged = layout_of(data=8, accumulation=4, pipeline_model_parallel_size=2)
    number = 4 * max(parameters_held(shape.layers, staged, stage) for stage in range(2))
    gather = "ZeRO: all-gather of weights"
    # A stage has 18 blocks: in each of two passes, 17 are gathered while another computes.
    for zero_stage, kind, factor, is_hidden in (
        (2, "gradients: all-reduce", 2 * 4, False),
        (3, gather, 2 * 4 * 17 / 18, True),
        (3, f"{gather}, first layer", 2 * 4 / 18, False),
        (3, "ZeRO: reduce-scatter", 4, False),
    ):
        keys = {"zero_stage": zero_stage, "pipeline_model_parallel_size": 2}
        layout = layout_of(data=8, accumulation=4, **keys)
        (found,) = (each for each in transfers(shape, layout, 8) if each.kind == kind)
        assert found.inside == pytest.approx(number * factor * 7 / 8)
        assert found.in_passes is not is_hidden
        assert found.is_hidden is is_hidden
        alone = layout_of(data=8, accumulation=4, zero_stage=zero_stage)
        assert not any(each.in_passes for each in transfers(shape, alone, 8))


def test_stages_gather_one_layer_ahead(shape):
    """Of iGPT-M a block is the largest layer; the next one is gathered while it computes."""
    keys = {"zero_stage": 3, "pipeline_model_parallel_size": 2}
    staged, alone = layout_of(data=8, **keys), layout_of(data=8, zero_stage=3)
    block = shape.layers.stacks[0].block.held(1)
    bucket = 4 * bucket_of(shape, alone)
    assert shape.layers.largest(1) == block
    assert rank_memory(shape, staged).buffers == bucket + 4 * block
    assert rank_memory(shape, alone).buffers == bucket + 4 * (shape.layers.total - block)


def test_stages_are_cut_once_for_all_layouts():
    one = LayerParameters(split=1, whole=1)
    stacks = (StackParameters(one, 2), StackParameters(one, 2))
    layers = Layers(one, stacks, (one,), one, weights=(1.0, 1.0, 1.0, 3.0))
    assert [stage.blocks for stage in layers.stages(2)] == [(2, 1), (0, 1)]
    assert layers.stages(2) is layers.stages(2)
    # A copy with other work is cut anew.
    other = replace(layers, weights=(3.0, 1.0, 1.0, 1.0))
    assert [stage.blocks for stage in other.stages(2)] == [(1, 0), (1, 2)]


@pytest.mark.parametrize("name", ["igpt/m_32", "darl/vit_h14_diff", "givt/encoder_decoder"])
@pytest.mark.parametrize("accumulation", [1, 4, 64])
def test_every_other_stage_needs_no_more_memory_than_one_of_the_fullest(
    context, name, accumulation
):
    shape = measured(build(context, name))
    for size in (1, 2, 4, 8):
        layout = layout_of(accumulation=accumulation, pipeline_model_parallel_size=size)
        held, kept = shape.layers.held(size, 1), shape.layers.fullest_stages(size)
        activations = [activation_memory(shape, layout, stage).total for stage in range(size)]
        for stage in range(size):
            assert any(
                held[stage] <= held[one] and activations[stage] <= activations[one] for one in kept
            ), (size, stage)


def test_hierarchical_partitioning_gathers_inside_a_node(shape):
    """One global gather a step; the other three micro-batches gather from the node's copy."""
    number = 4 * shape.layers.total
    keys = {"zero_stage": 3, "hierarchical_partition_size": 8}
    layout = layout_of(data=16, accumulation=4, **keys)
    found = {transfer.kind: transfer for transfer in transfers(shape, layout, 8)}
    far, near = (found[f"ZeRO: all-gather of {name}"] for name in ("weights", "copied weights"))
    assert (far.inside, far.between) == pytest.approx((number * 7 / 8, number / 16))
    assert (near.inside, near.between) == pytest.approx((3 * number * 7 / 8, 0))
    options = {"precision": "float32", "keeps_average": False}
    plain = layout_of(data=16, accumulation=4, zero_stage=3)
    weights = [states_of(shape.layers, each, 0, **options).weights for each in (plain, layout)]
    assert weights == pytest.approx([number / 16, number / 16 + number / 8])


@pytest.mark.parametrize(
    ("zero_stage", "precision", "weights", "gradients", "optimizer"),
    [
        (0, "float32", 4, 4, 8),
        (1, "bf16", 2, 4, 12 / 8),
        (2, "bf16", 2, 4 / 8, 12 / 8),
        (3, "bf16", 2 / 8, 4 / 8, 12 / 8),
        (1, "float32", 4, 4, 12 / 8),
    ],
)
def test_bytes_of_each_parameter_on_eight_processes(
    shape, zero_stage, precision, weights, gradients, optimizer
):
    """As in figure 1 of the ZeRO paper, but for gradients in float32."""
    layout, block = layout_of(8, zero_stage=zero_stage), 12 * 1024**2 + 2 * 1024
    own = replace(shape, precision=precision, keeps_average=True)
    states = rank_memory(own, layout).states
    number, average = shape.layers.total, 4 if zero_stage == 0 else 4 / 8
    assert states.weights == weights * number
    assert (states.gradients, states.optimizer) == (gradients * number, optimizer * number)
    assert states.average == average * number
    assert states.gathered == (2 * block if zero_stage == 3 else 0)
    total = (weights + gradients + optimizer + average) * number
    assert states.total == pytest.approx(total + states.gathered)
    # Plain SGD keeps one moment; offloaded states take nothing, nor do offloaded weights.
    sgd = rank_memory(replace(own, optimizer="sgd"), layout).states
    assert states.optimizer - sgd.optimizer == average * number
    offload = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    away = rank_memory(own, layout_of(8, zero_stage=zero_stage, **offload)).states
    assert (away.optimizer, away.average, away.weights) == (0, 0, 0)
    assert away.gradients == states.gradients


@pytest.mark.parametrize(
    ("zero_stage", "precision", "gradient_size", "parameters", "size"),
    [
        # DeepSpeed's bucket holds more than all 455 M gradients; in bf16 they are cast too.
        (0, "float32", 4, None, 4),
        (1, "bf16", 4, None, 4 + 2),
        # A block's, in the compute precision or with a copy that is averaged.
        (1, "float32", 4, 12 * 1024**2, 4),
        (2, "bf16", 2, 12 * 1024**2, 2),
        (2, "bf16", 4, 12 * 1024**2, 4 + 2),
    ],
)
def test_buffers_by_hand(shape, zero_stage, precision, gradient_size, parameters, size):
    own = replace(shape, precision=precision, gradient_size=gradient_size)
    memory = rank_memory(own, layout_of(8, zero_stage=zero_stage))
    assert memory.buffers == (parameters or shape.layers.total) * size
    assert memory.total == memory.states.total + memory.activations.total + memory.buffers
    # Megatron's buffer holds a whole sequence of each of three images: 1024 tokens of 1024 numbers.
    (found,) = shape.activations.values()
    own = replace(own, activations={(2, 1, each, "none"): found for each in (False, True)})
    keys = {"zero_stage": zero_stage, "tensor_model_parallel_size": 2}
    plain, split = (
        rank_memory(own, layout_of(4, micro=3, sequence_parallel=each, **keys)).buffers
        for each in (False, True)
    )
    assert split - plain == 3 * own.number_size * 1024**2
    if parameters is None:
        # A single process reduces nothing.
        assert rank_memory(shape, layout_of(1, zero_stage=0)).buffers == 0


@pytest.mark.parametrize("gradient_size", [2, 4])
def test_bf16_gradient_bytes_follow_the_reduction_dtype(shape, gradient_size):
    half = replace(shape, precision="bf16", gradient_size=gradient_size)
    number = 2 * half.layers.total * 7 / 8
    for zero_stage, kind, factor in (
        (1, "gradients: all-reduce", 1),
        (3, "ZeRO: reduce-scatter", 0.5),
    ):
        found = transfers(half, layout_of(data=8, zero_stage=zero_stage), 8)
        (sent,) = (transfer.inside for transfer in found if transfer.kind == kind)
        assert sent == pytest.approx(number * gradient_size * factor)


def test_step_time_mfu_and_slower_network(shape):
    """MFU follows from the total time; a slower network only adds communication."""
    cluster = Cluster(open_device("h100"), 8, 8)
    plan = plan_layout(shape, layout_of(data=8, micro=16), cluster, steps=86_400)
    time = plan.time
    images = 8 * 16
    assert time.mfu == pytest.approx(shape.flops * images / time.total / (8 * 67e12))
    assert plan.days == pytest.approx(time.total)
    slow = Cluster(open_device("h100", interconnect="100ge"), 8, 4)
    other = plan_layout(shape, layout_of(data=8, micro=16), slow, steps=1).time
    assert other.communication > time.communication
    assert other.products == time.products


def test_parts_of_a_step_by_hand(shape):
    """Two stages of 18 of 36 blocks in float32 on H100s; the formulas of docs/scaling.md."""
    cluster = Cluster(open_device("h100"), 8, 8)
    layout = layout_of(4, micro=4, accumulation=8, zero_stage=1, pipeline_model_parallel_size=2)
    time = plan_layout(shape, layout, cluster, steps=1).time
    images, memory, network = 4 * 8, 0.7 * 3350e9, 0.8 * 450e9
    reached = 0.7 * 67e12 * 4096 / (4096 + 256) * 1024 / (1024 + 128)
    products = images * shape.flops / 2 / reached
    # Each saved activation is touched five times.
    (saved,) = (each.block.saved for each in measured_for(shape).stacks)
    elementwise = images * 5 * 18 * saved / memory
    # Point to point: 16 messages of four images' 1024 · 1024 numbers, which the passes wait for.
    sent = 16 * (20e-6 + 4 * 4 * 1024 * 1024 / network)
    bubble = (products + elementwise + sent) / 8
    # A quarter of the weights, of which Adam reads and writes gradient, master weight, two moments
    # and weight.
    held = parameters_held(shape.layers, layout)
    adam = held / 4 * 2 * (4 + 12 + 4) / memory
    most = max(parameters_held(shape.layers, layout, stage) for stage in range(2))
    calls = most // (12 * 1024**2) + 1 + 1
    reduced = calls * 20e-6 + (2 + 1) * 4 * most * 3 / 4 / network
    parts = (time.products, time.elementwise, time.bubble, time.optimizer, time.communication)
    assert parts == pytest.approx((products, elementwise, bubble, adam, sent + reduced))
    assert (time.encoding, time.overlapped) == (0, 0)
    assert time.device == pytest.approx(sum(parts))
    # The EMA is one more state. Offloaded, gradients and weights cross the bus, and eight
    # processes share the node's memory.
    averaged = plan_layout(replace(shape, keeps_average=True), layout, cluster, steps=1).time
    assert averaged.optimizer == pytest.approx(adam * (4 + 16 + 4) / (4 + 12 + 4))
    offload = layout.parallel.model_copy(update={"offload_optimizer": "cpu"})
    on_host = plan_layout(shape, replace(layout, parallel=offload), cluster, steps=1).time
    expected = held / 4 * ((4 + 4) / 20e9 + 2 * (4 + 12) * 8 / 150e9)
    assert on_host.optimizer == pytest.approx(expected)


def measured_for(shape):
    """Return the activations in the only way in which the shape's layers were measured."""
    (found,) = shape.activations.values()
    return found


def test_recomputation_takes_time(shape):
    """`full`: a third more of everything. `selective`: its activations are touched four times."""
    cluster, plain = Cluster(open_device("h100"), 8, 8), measured_for(shape)
    (stack,) = plain.stacks
    block = replace(stack.block, saved=0.25 * stack.block.saved)
    fewer = replace(plain, stacks=(replace(stack, block=block),))
    ways = {"none": plain, "selective": fewer, "full": plain}
    (key,) = shape.activations
    shape = replace(shape, activations={(*key[:3], kind): ways[kind] for kind in ways})
    none, selective, full = (
        plan_layout(
            shape, layout_of(8, micro=16, activation_checkpointing=kind), cluster, steps=1
        ).time
        for kind in ways
    )
    assert selective.products == none.products
    assert selective.elementwise == pytest.approx(none.elementwise * (5 + 4 * 0.75) / 5)
    for part in ("products", "elementwise", "host"):
        assert getattr(full, part) == pytest.approx(4 / 3 * getattr(none, part))


def test_products_of_groups_and_heads(shape):
    """Both groups divide the blocks' products, and make them smaller; a head's are whole."""
    cluster, sizes = Cluster(open_device("h100"), 8, 8), {"micro": 16, "accumulation": 2}
    plain = measured_for(shape)
    keys = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    reached = 0.7 * 67e12 * 4096 / (4096 + 256) * 512 / (512 + 128)
    for head in (0.0, 1e12):
        activations = {(2, 4, False, "none"): replace(plain, head_flops=head)}
        own = replace(shape, activations=activations)
        time = plan_layout(own, layout_of(1, **sizes, **keys), cluster, steps=1).time
        assert time.products == pytest.approx(16 * 2 * (shape.flops / 8 + head) / reached)
        at_peak = 16 * 2 * (shape.flops + head) / (8 * 67e12)
        assert time.mfu == pytest.approx(at_peak / time.total)
        # What a head with networks saves is touched as often as what blocks save.
        saved = 36 * plain.stacks[0].block.saved + (head > 0) * plain.head.saved
        assert time.elementwise == pytest.approx(16 * 2 * 5 * saved / (0.7 * 3350e9))


def test_part_of_the_overlapped_communication_is_felt(shape):
    """A tenth, or what remains when the computation is over."""
    sizes = {"micro": 16, "zero_stage": 3}
    for interconnect, felt in ((None, 0.1), ("0.001", 1.0)):
        cluster = Cluster(open_device("h100", interconnect=interconnect), 8, 1)
        time = plan_layout(shape, layout_of(8, **sizes), cluster, steps=1).time
        shown = [
            each.calls * 20e-6 + each.between / (0.8e9 * cluster.device.network_gb_per_s)
            for each in transfers(shape, layout_of(8, **sizes), 1)
            if not each.is_hidden
        ]
        exposed = time.communication - sum(shown)
        hidden = exposed + time.overlapped
        busy = time.products + time.elementwise
        assert exposed == pytest.approx(max(0.1 * hidden, hidden - busy))
        assert exposed / hidden == pytest.approx(felt, rel=0.01)


FP8 = ["training.kernels=transformer_engine", "training.fp8=true"]


def test_fp8_blocks_run_at_the_peak_of_fp8(context):
    """By hand for iGPT-M: only products with weights of the blocks are in FP8."""
    half, mixed = (measured(build(context, "igpt/m_32", *HALF, *more)) for more in ([], FP8))
    width, blocks, tokens, colors = 1024, 36, 1024, 512
    # Queries, keys, values, output and MLP; causal attention; head. Backward: twice the forward.
    products = 3 * 2 * tokens * blocks * (4 + 8) * width**2
    rest = 3 * 2 * tokens * (blocks * width * (tokens + 1) + width * colors)
    assert half.flops == mixed.flops == products + rest
    assert (half.fp8_share, mixed.fp8_share) == (0.0, pytest.approx(products / (products + rest)))
    layout = layout_of(data=8, micro=16, zero_stage=1)
    cluster = Cluster(open_device("h100"), 8, 8)
    plain, fp8 = (plan_layout(each, layout, cluster, steps=1).time for each in (half, mixed))
    at_peak = products / 1979e12 + rest / 989e12
    assert fp8.products / plain.products == pytest.approx(at_peak / ((products + rest) / 989e12))
    # Share of the time that the peaks would need for 16 images a device.
    assert fp8.mfu == pytest.approx(16 * at_peak / fp8.total)
    assert (fp8.elementwise, fp8.host) == (plain.elementwise, plain.host)
    with pytest.raises(UserError, match="training.fp8: a100 has no FP8"):
        plan_layout(mixed, layout, Cluster(open_device("a100"), 8, 8), steps=1)


@pytest.mark.parametrize(
    ("name", "words"),
    [("mae/tiny", []), ("darl/demo", ["objective.decoder=transformer"]), ("mp3/demo", [])],
)
def test_fp8_share_is_that_of_products_with_weights_of_blocks(context, name, words):
    """As torch's counter of products finds them in the blocks of all stacks."""
    sizes = ["model.hidden_size=64", "model.ffn_hidden_size=256"]
    objective = build(context, name, "model.num_layers=3", *HALF, *FP8, *sizes, *words)
    planned = objective.fp8_share() * objective.flops_per_image() / 3
    meta, inside = torch.device("meta"), 0
    with meta:
        layers = [plan.build() for plan in objective.layer_plans()]
    state = objective.blank_sequence(IMAGES, meta).inputs
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for layer in layers:
            state = layer(state)
    for module, found in counter.get_flop_counts().items():
        if module.endswith((".linear_qkv", ".linear_proj", "_fc1", "_fc2")):
            inside += sum(found.values())
    assert planned == pytest.approx(inside / IMAGES)


def test_short_steps_are_host_bound(shape):
    """For a single image, launching ZeRO-3's gathers takes longer than the computation."""
    cluster = Cluster(open_device("h100"), 8, 8)

    def time_of(**keys):
        return plan_layout(shape, layout_of(data=8, **keys), cluster, steps=1).time

    whole, gathered = time_of(micro=1), time_of(micro=1, zero_stage=3)
    assert gathered.total == gathered.host > gathered.device
    assert whole.total == whole.device > whole.host
    ratio = MILLISECONDS[False, 3] / MILLISECONDS[False, 1]
    assert gathered.host / whole.host == pytest.approx(ratio)
    assert time_of(micro=1, accumulation=4).host == pytest.approx(4 * whole.host)


def test_devices_from_names_and_files(tmp_path):
    assert open_device("A100", memory="40GB").memory_gb == 40
    assert open_device("h200", interconnect="hdr").network_gb_per_s == 25
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nmemory_gb: 24\nbf16_tflop: 100\n")
    with pytest.raises(UserError, match=r"mine.yaml:3: bf16_tflop: "):
        open_device(str(path))
    with pytest.raises(UserError, match="h300 is not a known GPU; use a100, h100, h200"):
        open_device("h300")
    with pytest.raises(UserError, match="'much' is not a valid amount"):
        open_device("h100", memory="much")
