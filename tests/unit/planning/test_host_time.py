"""The host's time in plans: measured, and never what a recommendation waits for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_check.refit import host_row
from megavis.commands.plan import measure
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.planning import host_time as module
from megavis.planning.devices import Cluster, open_device
from megavis.planning.host_time import MILLISECONDS, Measured, host_time, read_measured
from megavis.planning.layouts import Layout
from megavis.planning.plan import plan_layout, recommend
from megavis.planning.step_time import sources

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"


@pytest.mark.parametrize(("zero", "stage"), [(0, 1), (1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("carries", [False, True])
def test_time_is_the_stage_s_and_the_block_s(carries, zero, stage):
    found = host_time(carries=carries, zero_stage=zero)
    assert found.seconds == pytest.approx(1e-3 * MILLISECONDS[carries, stage])


@pytest.mark.parametrize(
    ("preset", "carries"),
    [
        ("igpt/xl_64.yaml", False),
        ("givt/causal_large.yaml", False),
        ("givt/maskgit.yaml", False),
        ("darl/vit_h14_diff.yaml", True),
        ("gvp/vit_b_p2p.yaml", True),
        ("mp3/vit_b_imagenet.yaml", True),
    ],
)
def test_kind_of_a_paper_s_blocks(preset, carries):
    """As docs/performance.md groups them: ZeRO-3 gathers those that carry nothing at once."""
    loaded = load_config(PRESETS / preset, ["model.num_layers=2"])
    assert measure(loaded, 8).main_stack.carries is carries


def test_each_stack_takes_its_own_time(cluster):
    """MAE's encoder carries the order of patches, and its decoder nothing."""
    loaded = load_config(PRESETS / "mae/vit_b16.yaml")
    parallel = loaded.config.parallel.model_copy(update={"zero_stage": 3})
    plan = plan_layout(measure(loaded, 8), Layout(parallel, 8, 64, 1), cluster, steps=1)
    blocks = 12 * MILLISECONDS[True, 3] + 8 * MILLISECONDS[False, 3]
    assert plan.time.host == pytest.approx(1e-3 * blocks)


def test_machine_s_own_time_comes_first_and_scales_the_others(monkeypatch):
    figures = {(False, 1): 2.0, (False, 3): 4.0, (True, 1): 3.0, (True, 3): 9.0}
    monkeypatch.setattr(module, "MILLISECONDS", figures)
    measured = Measured("H100", {(False, 1): 0.001, (False, 3): 0.002})
    own = host_time(carries=False, zero_stage=3, measured=measured)
    assert own == module.HostTime(0.002, "measured on this H100")
    # Half as long for these, so half as long for the others.
    scaled = host_time(carries=True, zero_stage=3, measured=measured)
    assert scaled.seconds == pytest.approx(0.0045)
    assert scaled.source.startswith("assumed, 0.5 times measured")


def stage_file(folder, number, rows, **keys):
    tree = {"device": "cuda", "small": False, "facts": {"device": "NVIDIA H100"}}
    tree |= {"parts": {"a": {"rows": rows}}, **keys}
    (folder / f"stage-{number}.json").write_text(json.dumps(tree))


def row(what, value, unit, **detail):
    return {"what": what, "value": value, "unit": unit, "detail": detail}


def test_gpu_check_s_folder_is_read(tmp_path):
    speeds = [
        row("speed: products of 8192², bfloat16", 700.0, "TFLOP/s"),
        row("speed: products of 8192², float32", 50.0, "TFLOP/s"),
        row("speed: copy in memory", 3000.0, "GB/s"),
    ]
    stage_file(tmp_path, 1, speeds)
    host = [
        row(f"host, {name}, ZeRO-3: a block", value, "ms", stage=3, carries=False)
        for name, value in {"GIVT-L": 1.5, "XL": 1.2}.items()
    ]
    stage_file(tmp_path, 8, [*host, row("two runs", True, "", losses=[])])
    expected = Measured("NVIDIA H100", {(False, 3): 0.0015}, 700.0, 3000.0)
    assert read_measured(tmp_path) == expected


def test_gpu_check_writes_what_plan_reads():

    made = host_row("GIVT-L", False, 3, (4, 12), (0.010, 0.018), (0.001, 0.0018))
    what = "host, GIVT-L, ZeRO-3: a block"
    assert (made.what, made.value, made.unit) == (what, pytest.approx(1.0), "ms")
    assert {"stage": 3, "carries": False}.items() <= made.detail.items()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"small": True}, "was measured with --small"),
        ({"device": "cpu"}, "was measured on a CPU"),
        ({"parts": 3}, "is not a stage's file"),
    ],
)
def test_what_was_not_measured_on_a_gpu_is_refused(tmp_path, keys, words):
    stage_file(tmp_path, 8, [], **keys)
    with pytest.raises(UserError, match=words):
        read_measured(tmp_path)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds neither stage-1.json nor stage-8.json"):
        read_measured(tmp_path)


@pytest.fixture(scope="module")
def loaded():
    return load_config(PRESETS / "givt/causal_large.yaml", ["training.batch_size=64"])


@pytest.fixture(scope="module")
def config(loaded):
    return loaded.config


@pytest.fixture(scope="module")
def shape(loaded):
    return measure(loaded, 4)


@pytest.fixture
def cluster():
    return Cluster(open_device("h100"), 4, 4)


def test_host_bounds_a_step_that_is_short(shape, config, cluster):
    """48 blocks at 10 ms on two micro-batches are 0.96 s."""
    slow = replace(cluster, measured=Measured("slow", {(False, 1): 0.010}))
    layout = Layout(config.parallel.model_copy(update={"zero_stage": 1}), 4, 8, 2)
    time = plan_layout(shape, layout, slow, steps=1).time
    assert time.host == pytest.approx(48 * 2 * 0.010)
    assert time.waits_for_host
    assert time.total == time.host
    assert sources(time, slow)["host"].startswith("10 ms a block and micro-batch, measured on this")


def test_collectives_of_a_tensor_group_take_the_host_s_time(shape, config, cluster):
    keys = {"tensor_model_parallel_size": 2, "zero_stage": 1}
    layout = Layout(config.parallel.model_copy(update=keys), 2, 16, 2)
    plan = plan_layout(shape, layout, cluster, steps=1)
    calls = sum(each.calls for each in plan.traffic if each.kind.startswith("tensor"))
    alone = 48 * 2 * 1e-3 * MILLISECONDS[False, 1]
    assert plan.time.host == pytest.approx(alone + 20e-6 * calls)


def test_nothing_bound_by_the_host_or_experimental_is_recommended(shape, config, cluster):
    found = recommend(config, shape, cluster)
    assert not found.best.time.waits_for_host
    assert not found.best.layout.is_experimental
    assert any(plan.layout.is_experimental for plan in found.plans)
    # With a host a hundred times slower, every layout waits for it, and the fastest is named.
    host = {(False, 1): 0.25, (False, 3): 0.6}
    slow = recommend(config, shape, replace(cluster, measured=Measured("slow", host)))
    assert slow.best.time.waits_for_host
    assert any("bounds every layout" in reason for reason in slow.reasons)


def test_faster_layouts_that_wait_for_the_host_are_left_out(shape, config, cluster):
    """A host with which only ZeRO-3 waits: the best has another stage, whatever is fastest."""
    slow = replace(cluster, measured=Measured("slow", {(False, 1): 1e-6, (False, 3): 1.0}))
    found = recommend(config, shape, slow)
    assert found.best.layout.zero_stage < 3
    waiting = [plan for plan in found.plans if plan.time.waits_for_host]
    assert {plan.layout.zero_stage for plan in waiting} == {3}


def test_zero_3_is_left_out_below_three_billion_parameters(shape, config, cluster, monkeypatch):
    """GIVT-L has 1.7 B. The host takes no time here."""
    quick = replace(cluster, measured=Measured("quick", {(False, 1): 1e-6, (False, 3): 1e-6}))
    slow = replace(quick, device=open_device("h100", interconnect="100"), devices_per_node=1)
    training = config.training.model_copy(update={"batch_size": 256})
    config = config.model_copy(update={"training": training})
    found = recommend(config, shape, slow)
    assert found.best.layout.zero_stage < 3
    assert any("left out: ZeRO-3, below 3 B parameters" in reason for reason in found.reasons)
    monkeypatch.setattr("megavis.planning.plan._FEW", 1e9)
    assert recommend(config, shape, slow).best.layout.zero_stage == 3


def test_exposed_and_overlapped_communication_add_up(shape, config, cluster):
    layout = Layout(config.parallel.model_copy(update={"zero_stage": 3}), 4, 16, 1)
    plan = plan_layout(shape, layout, cluster, steps=1)
    sent = sum(each.inside for each in plan.traffic) / (0.8e9 * cluster.device.node_gb_per_s)
    calls = sum(each.calls for each in plan.traffic) * 20e-6
    assert plan.time.communication + plan.time.overlapped == pytest.approx(sent + calls)


def test_machine_s_speeds_replace_assumptions(shape, config, cluster):
    layout = Layout(config.parallel.model_copy(update={"zero_stage": 1}), 4, 16, 1)
    before = plan_layout(shape, layout, cluster, steps=1).time
    # 70 % of 989 and 3,350 are assumed; half of these were measured.
    half = Measured("H100", {}, 0.35 * 989, 0.35 * 3350)
    after = plan_layout(shape, layout, replace(cluster, measured=half), steps=1).time
    assert after.products == pytest.approx(2 * before.products, rel=1e-3)
    assert after.elementwise == pytest.approx(2 * before.elementwise, rel=1e-3)
    known = sources(after, replace(cluster, measured=half))
    assert known["products"].startswith("35% of peak, measured on this H100")
    assert known["memory"].endswith("measured on this H100")
    assert sources(before, cluster)["memory"].endswith("assumed")
