"""A model of two stacks: parameters, FLOPs, memory, features and pipeline cuts."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megavis.model.core import Block
from megavis.model.stack import LayerStack

FOLDER = Path(__file__).parents[2] / "two_stacks"


@pytest.fixture(scope="module", autouse=True)
def _register_two_stacks():
    """Make the folder importable as a subpackage of `megavis.papers`."""
    from megavis import papers

    papers.__path__.append(str(FOLDER))
    yield
    papers.__path__.remove(str(FOLDER))


@pytest.fixture
def two_stacks_of(build, tmp_path):
    """Build the objective and its `Inference`: 16 pixels, two blocks of width 16 and two of 8."""

    def make(*words):
        names = ("objective.name=two_stacks", "objective.upper_size=8")
        return build(tmp_path / "c.yaml", *names, *words)

    return make


@pytest.fixture
def two_stacks(two_stacks_of):
    """The model without overrides."""
    return two_stacks_of()


def test_queries_depend_only_on_earlier_pixels(two_stacks):
    """Gradients flow through the lower stack, the bridge and the upper stack."""
    objective, inference = two_stacks
    ids = torch.randint(32, (1, 16), generator=torch.Generator().manual_seed(0))
    seen = []
    hook = inference.layers.modules[0].content.register_forward_hook(
        lambda _, __, out: seen.append(out.retain_grad() or out)
    )
    state = objective.inputs_from(ids)
    for layer in inference.layers.modules:
        state = layer(state)
    hook.remove()
    logits = objective.outputs(state)
    assert logits.shape == (1, 16, 32)
    for place in range(16):
        seen[0].grad = None
        logits[0, place].square().sum().backward(retain_graph=True)
        reached = seen[0].grad[0].abs().sum(-1) > 0
        assert reached.tolist() == [other < place for other in range(15)]


def test_flops_match_torch_flop_counter(two_stacks):
    objective, inference = two_stacks
    ids = torch.zeros(2, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        state = objective.inputs_from(ids)
        for layer in inference.layers.modules:
            state = layer(state)
    # torch also counts the scores that causal attention skips.
    left_out = 2 * 4 * 16 * (16 - 17 / 2) * 16
    planned = objective.flops_per_image() / 3 + left_out
    assert planned == pytest.approx(counter.get_total_flops() / 2, rel=1e-6)


def test_parameters_are_counted_by_stack(two_stacks):
    from megavis.planning.parameters import by_part, count_parameters

    objective, inference = two_stacks
    counted = by_part(count_parameters(objective))
    found = dict.fromkeys(("embedding", "blocks", "bridge", "upper", "head"), 0)
    for name, parameter in inference.layers.named_parameters():
        found[name.partition(".")[0]] += parameter.numel()
    assert counted == found


def test_features_come_from_the_lower_stack(two_stacks):
    """Features are token means of each norm's output, from the first block to the bridge."""
    objective, inference = two_stacks
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    embedding, first, second, bridge, *_ = inference.layers.modules
    inputs = objective.inputs_from(ids)
    with torch.no_grad():
        state = embedding(inputs)
        between = first(state)
        expected = [
            first.input_layernorm(state).mean(0),
            second.input_layernorm(between).mean(0),
            bridge.norm(second(between)).mean(0),
        ]
    torch.testing.assert_close(inference.features(inputs), torch.stack(expected))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_planned_activations_match_autograd(two_stacks_of, checkpointing):
    """Both stacks, the bridge, embedding and head, on one stage and on two."""
    from megavis.planning.activation_memory import activation_memory
    from megavis.planning.layouts import Layout, layout_key
    from megavis.planning.measured_activations import activations_of
    from megavis.planning.meta_device import num_bytes, saved_tensors
    from megavis.planning.shape import shape_of

    words = (f"parallel.activation_checkpointing={checkpointing}", "model.num_layers=4")
    objective, _ = two_stacks_of(*words, "objective.upper_layers=3")
    parallel = objective.config.parallel
    shape = shape_of(objective, {layout_key(parallel): activations_of(objective)})
    stack = LayerStack(objective.layer_plans(), objective.loss).train()
    sequence = objective.blank_sequence(2, torch.device("cpu"))
    found, _ = saved_tensors(lambda: stack(sequence.inputs, sequence.targets), [stack])
    planned = activation_memory(shape, Layout(parallel, 1, 2, 1))
    assert planned.saved == pytest.approx(num_bytes(found), rel=0.1)
    halves = parallel.model_copy(update={"pipeline_model_parallel_size": 2})
    cut = Layout(halves, 1, 2, 1)
    stages = [activation_memory(shape, cut, stage).saved for stage in range(2)]
    assert sum(stages) == pytest.approx(planned.saved)
    numbers = [sum(p.numel() for p in layer.parameters()) for layer in stack.layers]
    # The cut falls after the third block of the lower stack.
    bound = 1 + shape.layers.stages(2)[0].blocks[0]
    assert shape.layers.held(2, 1) == (sum(numbers[:bound]), sum(numbers[bound:]))


def test_generation_runs_both_stacks_over_all_tokens(two_stacks, tmp_path):
    """The upper stack's queries cannot be cached: greedy ids match full forward passes."""
    from megavis.sampling.sampler import Sampler

    objective, inference = two_stacks
    sampler = Sampler(inference, objective, tmp_path, {"temperature": 0.0})
    drawn = sampler.tokens(torch.arange(3))
    ids = torch.zeros(1, 16, dtype=torch.int64)
    for place in range(16):
        logits = objective.outputs(inference.predictions(objective.inputs_from(ids)))
        ids[:, place] = logits[:, place].argmax(1)
    assert torch.equal(drawn, ids.expand(3, -1))


def test_stacks_draw_drop_path_independently(two_stacks):
    """Blocks with the same number in different stacks drop different images."""
    objective, _ = two_stacks
    samples = torch.arange(200)
    lower, upper = (
        Block(core.with_stack(drop_path=0.5), 2)._draw_kept(samples)
        for core in (objective.core, objective.upper)
    )
    assert lower.shape == upper.shape
    assert not torch.equal(lower, upper)


def test_layer_depths_and_names(two_stacks):
    plans = two_stacks[0].layer_plans()
    assert [plan.depth for plan in plans] == [*range(7)]
    names = ["embedding", "blocks.0", "blocks.1", "bridge", "upper.0", "upper.1", "head"]
    assert [plan.name for plan in plans] == names


def test_stages_balance_work(two_stacks, build, tmp_path):
    from megavis.model.stack import block_weights
    from megavis.planning.parameters import stage_bounds

    plans = two_stacks[0].layer_plans()
    places, weights = block_weights(plans)
    assert places == [1, 2, 4, 5]
    # By hand for 16 pixels: matrix products and scores of read tokens, then keys and values.
    lower = [16 * (2 * 16**2 + 2 * 16 * 64 + 2 * 16 * 8.5) + 16 * 2 * 16**2] * 2
    own = 2 * 8**2 + 2 * 8 * 24 + 2 * 8 * 16
    upper = [(32 + 16) / 2 * own + 16 * 2 * 8**2] * 2
    assert weights == pytest.approx([cost / lower[0] for cost in (*lower, *upper)])
    # Both narrow blocks together cost less than one wide block.
    assert stage_bounds(plans, 2) == [0, 2, 7]
    assert stage_bounds(plans, 3) == [0, 2, 4, 7]


def test_balanced_bounds_minimize_the_largest_stage():
    from itertools import combinations, pairwise

    from megavis.planning.parameters import balanced_bounds

    weights = (1.0, 1.0, 0.4, 2.5, 0.4, 1.0, 0.4, 0.4, 2.5)

    def largest(bounds):
        return max(sum(weights[start:stop]) for start, stop in pairwise(bounds))

    for parts in range(1, 6):
        every = [(0, *inner, 9) for inner in combinations(range(1, 9), parts - 1)]
        assert largest(balanced_bounds(weights, parts)) == min(map(largest, every))


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(3, 2), (24, 8), (7, 3), (12, 5)])
def test_stage_bounds_of_equal_blocks_match_deepspeed(build, tmp_path, num_blocks, num_stages):
    from deepspeed.runtime.utils import partition_balanced

    from megavis.planning.parameters import stage_bounds

    objective, _ = build(tmp_path / "c.yaml", f"model.num_layers={num_blocks}")
    theirs = partition_balanced([0, *[1] * num_blocks, 0], num_stages)
    assert stage_bounds(objective.layer_plans(), num_stages) == [int(bound) for bound in theirs]
