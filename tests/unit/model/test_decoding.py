"""Incremental decoding, which bypasses the blocks' modules, against full forward passes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from engine_jobs import stand_in
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megavis.model import decoding, static_step
from megavis.model.core import Block
from megavis.model.decoding import IncrementalDecoder
from megavis.model.kernels import choose_kernels
from megavis.model.static_step import StaticStep
from megavis.sampling.sampler import Sampler
from megavis.schedules.one_by_one import OneByOne
from megavis.schedules.orders import Orders
from megavis.schedules.schedule import PredictionTargets

LAYER_NORM = "model.normalization=layer_norm"
SHAPES = [
    # config overrides, number of given tokens, number of images
    ([], 1, 1),
    (["model.num_attention_heads=4", "model.positions=rope_2d"], 3, 2),
    ([LAYER_NORM, "model.add_bias=true", "model.activation=gelu"], 1, 3),
    ([LAYER_NORM, "model.norm_bias=last", "model.positions=rope_1d"], 5, 2),
]


def inputs_at(objective, ids, start, stop):
    """Return the inputs at positions [start, stop)."""
    schedule = OneByOne(Orders(torch.arange(objective.num_tokens)))
    plan = schedule.draw(torch.zeros(1, dtype=torch.int64))
    return objective.rows(ids, PredictionTargets(plan, stop - 1, slice(stop - 1, stop)), (), start)


def logits_piece_by_piece(inference, objective, cache, ids, num_given):
    """Return logits `[b, n, v]`: `num_given` positions in one pass, then one at a time."""
    parts, stops = [], [num_given, *range(num_given + 1, ids.shape[1] + 1)]
    for stop in stops:
        inputs = inputs_at(objective, ids, cache.length, stop)
        parts.append(objective.outputs(inference.predictions(inputs, cache=cache)))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(("words", "num_given", "num_images"), SHAPES)
def test_incremental_decoding_matches_full_pass(
    build, tmp_path, words, num_given, num_images, monkeypatch
):
    objective, inference = build(tmp_path / "c.yaml", *words)
    ids = torch.randint(32, (num_images, 16), generator=torch.Generator().manual_seed(0))
    whole = objective.outputs(inference.predictions(objective.inputs_from(ids)))
    called = []
    monkeypatch.setattr(Block, "attend", _counting(Block.attend, called))
    cache = inference.cache(16)
    assert isinstance(cache, IncrementalDecoder)
    pieces = logits_piece_by_piece(inference, objective, cache, ids, num_given)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))
    assert len(called) == 2, "modules must run once per block, only for the given tokens"


@pytest.mark.parametrize(("words", "num_given", "num_images"), SHAPES)
def test_blocks_of_transformer_engine_decode_alike(build, tmp_path, words, num_given, num_images):
    """Decoding reads their weights and norms, whose attributes are another library's."""
    ids = torch.randint(32, (num_images, 16), generator=torch.Generator().manual_seed(0))

    def pieces():
        objective, inference = build(tmp_path / "c.yaml", *words)
        cache = inference.cache(16)
        assert isinstance(cache, IncrementalDecoder)
        return logits_piece_by_piece(inference, objective, cache, ids, num_given)

    wanted = pieces()
    with stand_in():
        choose_kernels("transformer_engine")
        found = pieces()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(("words", "num_given", "num_images"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True], ids=["as on a CPU", "with a GPU's norms"])
def test_static_steps_match_growing_ones(
    build, tmp_path, words, num_given, num_images, dtype, fused, monkeypatch
):
    monkeypatch.setattr(decoding, "REACH", 4)
    objective, inference = build(tmp_path / "c.yaml", *words)
    for layer in inference.layers.modules:
        layer.to(dtype)
    # Fifteen tokens: the last reach is no multiple of four.
    ids = torch.randint(32, (num_images, 15), generator=torch.Generator().manual_seed(0))
    caches = [inference.cache(15)]
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "is_fused", lambda _: fused)
        caches.append(inference.cache(15, static=True))
    growing, static = (
        logits_piece_by_piece(inference, objective, cache, ids, num_given).float()
        for cache in caches
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(static, growing, rtol=0, atol=tolerance * float(growing.abs().max()))
    steps = caches[1]._steps
    assert sorted(steps) == [reach for reach in (4, 8, 12, 15) if reach > num_given]


def test_a_static_step_allocates_nothing_that_grows(build, tmp_path):
    """Every step of a reach gives operations the same shapes, as a CUDA graph needs them."""
    objective, inference = build(tmp_path / "c.yaml", "model.positions=rope_2d")
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    shapes = {}
    for static in (False, True):
        cache, seen = inference.cache(16, static=static), []
        logits_piece_by_piece(inference, objective, cache, ids[:, :3], 3)
        for stop in (4, 5, 6):
            with Shapes() as made:
                inference.predictions(inputs_at(objective, ids, stop - 1, stop), cache=cache)
            # The first step also allocates its tensors.
            seen += [made.list] if stop > 4 else []
        shapes[static] = seen
    assert shapes[True][0] == shapes[True][1]
    assert shapes[False][0] != shapes[False][1]


@pytest.mark.parametrize("options", [{}, {"beams": 2, "fans": 2}])
def test_static_steps_draw_the_same_ids(build, tmp_path, options):
    objective, inference = build(tmp_path / "c.yaml")
    sampler = Sampler(inference, objective, tmp_path, options)
    ids = [sampler.tokens(torch.arange(3), static=static) for static in (False, True)]
    assert torch.equal(*ids)


class Graphs:
    """Stands in for CUDA graphs: counts replays, and may fail like them."""

    def __init__(self, fault):
        self.fault, self.num_replays = fault, 0

    def __call__(self, run, device):
        if self.fault == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.fault == "memory":
            raise torch.OutOfMemoryError

        def replay():
            self.num_replays += 1
            if self.fault != "numbers":
                run()

        run()
        return replay


def steps_with_graphs(monkeypatch, fault, *, strict=False):
    """Return the results of four steps of two graphs, as on a GPU, and the graphs."""
    graphs = Graphs(fault)
    monkeypatch.setattr(static_step, "captured", graphs)

    def add_one(hidden, *_):
        hidden.add_(1)

    cache = torch.zeros(1, 2, 1, 1, 4, 2)
    step = StaticStep([add_one], cache, 4, torch.zeros(1, 2), None, strict=strict)
    return [step(torch.full((1, 2), float(i)), None, i)[0, 0].item() for i in range(4)], graphs


def test_steps_replay_a_graph(monkeypatch):
    results, graphs = steps_with_graphs(monkeypatch, fault=None)
    assert results == [1, 2, 3, 4]
    # Once to compare it.
    assert graphs.num_replays == 4


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("capture", "could not be captured: operation not"),
        ("numbers", "computes different numbers"),
    ],
)
def test_steps_do_without_a_graph_that_fails(monkeypatch, caplog, fault, reason):
    results, graphs = steps_with_graphs(monkeypatch, fault)
    assert results == [1, 2, 3, 4]
    assert graphs.num_replays == (fault == "numbers")
    assert reason in caplog.text
    with pytest.raises(RuntimeError, match=reason):
        steps_with_graphs(monkeypatch, fault, strict=True)


def test_steps_do_not_hide_that_memory_is_full(monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        steps_with_graphs(monkeypatch, "memory")


@pytest.mark.parametrize(
    ("device", "library", "is_static"),
    [("cuda", "auto", True), ("cuda", "torch", False), ("cpu", "auto", False)],
)
def test_steps_are_static_on_a_gpu(build, tmp_path, monkeypatch, device, library, is_static):
    _, inference = build(tmp_path / "c.yaml")
    monkeypatch.setattr("megavis.model.inference.chosen_kernels", lambda: library)
    inference.context = replace(inference.context, device=torch.device(device))
    assert inference.cache(16).is_static is is_static


def test_cache_select_reorders_sequences(build, tmp_path):
    objective, inference = build(tmp_path / "c.yaml")
    ids = torch.randint(32, (3, 16), generator=torch.Generator().manual_seed(0))
    order = torch.tensor([2, 0, 0])
    cache = inference.cache(16)
    logits_piece_by_piece(inference, objective, cache, ids[:, :9], 1)
    cache.select(order)
    inputs = inputs_at(objective, ids[order], 9, 10)
    logits = objective.outputs(inference.predictions(inputs, cache=cache))
    whole = objective.outputs(inference.predictions(objective.inputs_from(ids[order])))
    torch.testing.assert_close(logits[:, 0], whole[:, 9], rtol=1e-5, atol=1e-4)


def test_bf16_decoding_returns_bf16(build, tmp_path, monkeypatch):
    objective, inference = build(tmp_path / "c.yaml", "model.positions=rope_2d")
    for layer in inference.layers.modules:
        layer.to(torch.bfloat16)
    ids = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
    whole = objective.outputs(inference.predictions(objective.inputs_from(ids)))
    cache = inference.cache(16)
    shapes, plain = [], F.scaled_dot_product_attention

    def recording(query, key, value, **options):
        shapes.append(query.shape)
        return plain(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    pieces = logits_piece_by_piece(inference, objective, cache, ids, 1)
    # Of images and heads: not all versions of torch have fused kernels for three dimensions.
    assert set(shapes) == {(2, 2, 1, 8)}
    assert pieces.dtype == whole.dtype == torch.bfloat16
    error = (pieces - whole).float().norm() / whole.float().norm()
    assert error < 0.03


def test_partitioned_weights_fall_back_to_the_modules(build, tmp_path):
    _, inference = build(tmp_path / "c.yaml")
    block = inference.layers.modules[1]
    # ZeRO-3 leaves an empty weight while its module is not running.
    block.mlp.linear_fc1.weight.data = torch.empty(0)
    assert not isinstance(inference.cache(16), IncrementalDecoder)


class Shapes(TorchDispatchMode):
    """Lists the shapes of all results."""

    def __init__(self):
        super().__init__()
        self.list = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        self.list += [tuple(each.shape) for each in tree_leaves(made) if torch.is_tensor(each)]
        return made


def _counting(function, calls):
    def counted(*arguments):
        calls.append(function)
        return function(*arguments)

    return counted
