"""What is planned for fine-tuning against autograd's saved tensors and counts by hand."""

import pytest
import torch
from full_objects import with_full_objects
from tiny import VIT, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megavis.config.load import load_config
from megavis.model.stack import LayerStack
from megavis.papers import build_objective
from megavis.parallel.device import DTYPES
from megavis.planning.activation_memory import activation_memory
from megavis.planning.layouts import Layout, layout_key
from megavis.planning.measured_activations import activations_of
from megavis.planning.meta_device import num_bytes, saved_tensors
from megavis.planning.parameters import count_parameters
from megavis.planning.shape import shape_of

pytestmark = pytest.mark.once

IMAGES = 2
MODEL = {**VIT, "num_layers": 4, "hidden_size": 32, "num_attention_heads": 2}
SEGMENTS = {"task": "segments", "head_width": 16}
INSTANCES = {"task": "instances", "head_width": 16, "window": 4, "global_blocks": [2, 4]}
FULL = {"activation_checkpointing": "full"}


MAE = "{name: mae, patch_size: 8}"
MASKED = (
    "{name: compose, reads: {kind: patches, patch_size: 8}, schedule: {kind: masked},"
    " asks: {kind: mask}, density: {kind: squared_error}, "
)


@pytest.fixture
def build(context, tmp_path):
    def make(finetune, precision="float32", parallel=None, objective=MAE):
        text = tiny(
            objective,
            model=MODEL,
            validates=True,
            data={"image_size": 64, "crop": "jittered"},
            training={"validate_every": 1, "precision": precision},
            parallel={"zero_stage": int(precision == "bf16"), **(parallel or {})},
            finetune={"num_classes": 5, **finetune},
        )
        path = tmp_path / "finetune.yaml"
        path.write_text(text)
        return build_objective(load_config(path, []).config, context)

    return make


def planned(objective):
    return shape_of(objective, {layout_key(objective.config.parallel): activations_of(objective)})


@pytest.mark.parametrize(
    ("finetune", "options"),
    [
        ({"task": "classes"}, {"parallel": FULL}),
        ({"task": "classes", "tuned_blocks": 2}, {}),
        ({"linear_evaluation": True, "concatenate": 3, "layer": 2, "standardize": False}, {}),
        (SEGMENTS, {}),
        ({**SEGMENTS, "tuned_blocks": 1}, {"precision": "bf16"}),
        (INSTANCES, {}),
        ({**INSTANCES, "detector": "cascade"}, {"precision": "bf16"}),
    ],
)
def test_planned_activations_match_autograd(build, finetune, options):
    objective = build(finetune, **options)
    config = objective.config
    stack = LayerStack(objective.layer_plans(), objective.loss)
    stack = stack.to(DTYPES[config.training.precision]).train()
    batch = objective.blank_batch(IMAGES, torch.device("cpu"))
    if finetune.get("task") == "instances":
        batch = with_full_objects(batch)
    sequence = objective.training_sequence(batch)
    found, _ = saved_tensors(lambda: stack(sequence.inputs, sequence.targets), [stack])
    layout = Layout(config.parallel, 1, IMAGES, 1)
    saved = activation_memory(planned(objective), layout).saved
    assert saved == pytest.approx(num_bytes(found), rel=0.05)


def test_blocks_that_differ_are_counted_each(build):
    """Tables of relative positions are those of the window, or of the grid of 8 × 8 patches."""
    objective = build({**INSTANCES, "relative_positions": True, "global_blocks": [2, 3, 4]})
    tables = {
        (matrix.shape, matrix.copies)
        for matrix in count_parameters(objective)
        if "query_positions" in matrix.name
    }
    assert tables == {((7, 16), 1), ((15, 16), 3)}
    total = sum(
        parameter.numel()
        for plan in objective.layer_plans()
        for parameter in plan.build().parameters()
    )
    assert sum(matrix.parameters for matrix in count_parameters(objective)) == total


def test_frozen_blocks_have_no_backward_pass_and_no_optimizer(build):
    whole, tuned = (planned(build(keys)) for keys in ({}, {"tuned_blocks": 1}))
    assert tuned.flops == pytest.approx(whole.flops * (1 / 4 + 3 / 4 / 3))
    block, head = (tuned.layers.stacks[0].block.held(1), tuned.layers.last.held(1))
    assert tuned.trained.total == block + head
    assert whole.trained.total == whole.layers.total


@pytest.mark.parametrize(
    "finetune",
    [
        {},
        {"tuned_blocks": 1},
        {"linear_evaluation": True},
        {"linear_evaluation": True, "read_out": "attention"},
        SEGMENTS,
        INSTANCES,
    ],
)
def test_operations_match_torch_flop_counter(build, finetune):
    objective = build(finetune)
    stack = LayerStack(objective.layer_plans(), objective.loss).train()
    batch = objective.blank_batch(IMAGES, torch.device("cpu"))
    if finetune.get("task") == "instances":
        batch = with_full_objects(batch)
    sequence = objective.training_sequence(batch)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        stack(sequence.inputs, sequence.targets).backward()
    # Patches, whose gradient needs no gradient of the pixels; not planned.
    is_frozen = "tuned_blocks" in finetune or "linear_evaluation" in finetune
    embedding = (1 if is_frozen else 2) * 2 * 64 * (8 * 8 * 3) * 32
    expected = counter.get_total_flops() / IMAGES - embedding
    assert planned(objective).total_flops == pytest.approx(expected, rel=0.02)
    if objective.counts_whole_step:
        assert objective.flops_per_image() == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize(
    "word",
    [
        "condition: {kind: labels, num_classes: 3, modulation: class}}",
        "memory: {kind: encoded_image, num_layers: 2, patch_size: 8}}",
    ],
)
@pytest.mark.parametrize("finetune", [{}, SEGMENTS])
def test_what_blocks_attend_to_and_are_modulated_by_counts(build, finetune, word):
    """An encoder alone is more than half of the work."""
    objective = build(finetune, objective=MASKED + word)
    plain = build(finetune)
    stack = LayerStack(objective.layer_plans(), objective.loss).train()
    without = LayerStack(plain.layer_plans(), plain.loss).train()
    found = []
    for each, model in ((stack, objective), (without, plain)):
        sequence = model.training_sequence(model.blank_batch(IMAGES, torch.device("cpu")))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            each(sequence.inputs, sequence.targets).backward()
        found.append(counter.get_total_flops() / IMAGES)
    more = objective.flops_per_image() - plain.flops_per_image()
    assert more == pytest.approx(found[0] - found[1], rel=0.07)


def test_operations_of_a_head_by_hand(build):
    """The largest map of the box head of a detector: a linear layer of 7 × 7 × w to 4 w."""
    shape = planned(build(INSTANCES))
    width = 16
    regions, masks = 512, 128
    convolutions = 4 * regions * 49 * 9 * width**2 + 4 * masks * 14**2 * 9 * width**2
    linear = regions * 49 * width * 4 * width
    # Twice for a multiplication and an addition, three times for both passes.
    least = 3 * 2 * (convolutions + linear)
    assert least < shape.head_flops < 2 * least
