"""DeepSpeed options for GPUs, and monitoring of slow ranks."""

import time
from types import SimpleNamespace

import pytest
import torch

from megavis.config.load import load_config
from megavis.training.callbacks.callback import StepState, WatchHardware
from megavis.training.deepspeed_config import deepspeed_config
from megavis.training.engine import ForwardClock, Pace

pytestmark = pytest.mark.once
CPU = torch.device("cpu")


def zero(*words, **options):
    config = load_config("yaml_configs/igpt/demo.yaml", words).config
    return config, deepspeed_config(config, 1, **options)["zero_optimization"]


def test_overlap_only_under_zero_3_and_on_gpus():
    for stage in (0, 1, 2):
        assert zero(f"parallel.zero_stage={stage}", on_gpu=True)[1]["overlap_comm"] is False
    assert zero("parallel.zero_stage=3", on_gpu=True)[1]["overlap_comm"]
    stages = ["parallel.pipeline_model_parallel_size=2"]
    for stage in (1, 2):
        assert not zero(*stages, f"parallel.zero_stage={stage}", on_gpu=True)[1]["overlap_comm"]
    assert "overlap_comm" not in zero("parallel.zero_stage=3")[1]


@pytest.mark.parametrize(
    ("width", "tensor", "wanted"), [(64, 1, 5e6), (1024, 1, 12 * 2**20), (1024, 2, 6 * 2**20)]
)
def test_gradients_are_reduced_about_a_block_at_a_time(width, tensor, wanted):
    words = [f"model.hidden_size={width}", "model.num_attention_heads=2"]
    words += [f"parallel.tensor_model_parallel_size={tensor}", "parallel.zero_stage=2"]
    assert zero(*words)[1]["reduce_bucket_size"] == wanted


def test_offload_pins_memory_only_on_gpus():
    words = ["parallel.zero_stage=3", "parallel.offload_optimizer=cpu"]
    assert not zero(*words)[1]["offload_optimizer"]["pin_memory"]
    assert zero(*words, on_gpu=True)[1]["offload_optimizer"]["pin_memory"]


def test_prefetch_bucket_holds_one_block(context):
    from megavis.papers import build_objective

    config, section = zero("parallel.zero_stage=3")
    plans = build_objective(config, context).layer_plans()
    block = next(plan for plan in plans if plan.stack is not None).build()
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    assert section["stage3_prefetch_bucket_size"] == matrices


def test_forward_clock_averages_since_last_read():
    clock = ForwardClock(CPU)
    assert clock.read() == 0.0
    for seconds in (0.01, 0.03):
        with clock.running():
            time.sleep(seconds)
    assert clock.read() >= 0.02
    assert clock.read() == 0.0


def test_the_host_waits_for_the_step_before_the_last(monkeypatch):
    """A collective that hangs on the GPU must stop the host within the time for a step."""
    made, calls = [], []

    class Event:
        def __init__(self):
            made.append(self)
            self.number = len(made)

        def record(self):
            calls.append(f"end of step {self.number}")

        def synchronize(self):
            calls.append(f"wait for {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    Pace(CPU).keep()
    assert calls == []
    pace = Pace(torch.device("cuda"))
    for _ in range(3):
        pace.keep()
    steps = ["end of step 1", "end of step 2", "wait for 1", "end of step 3", "wait for 2"]
    assert calls == steps


def test_slowest_rank_is_recorded():
    def gather(mine):
        return [mine, 3 * mine, 2 * mine]

    clock = SimpleNamespace(read=lambda: 0.5)
    context = SimpleNamespace(device=CPU, world=SimpleNamespace(size=3), gather=gather)
    engine = SimpleNamespace(context=context, forward_clock=clock)
    watch, loss = WatchHardware(2), torch.zeros(())
    early, due = StepState(1, 9, loss, engine), StepState(2, 9, loss, engine)
    for state in (early, due):
        watch(state)
    assert early.record == {}
    assert due.record == {"forward_s": 1.0, "slowest_forward_s": 1.5, "slowest_rank": 1}
