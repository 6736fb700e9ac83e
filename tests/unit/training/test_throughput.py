"""Logged throughput: of training steps only."""

from types import SimpleNamespace

import torch

from megavis.training.callbacks import callback
from megavis.training.callbacks.callback import LogMetrics, StepState

BATCH, TOKENS = 8, 3
ENGINE = SimpleNamespace(
    mean_over_data=float,
    rate=lambda step: 0.1,
    gradient_norm=lambda: 1.0,
    loss_scale=lambda: None,
    config=SimpleNamespace(training=SimpleNamespace(batch_size=BATCH)),
    context=SimpleNamespace(device=torch.device("cpu")),
)
OBJECTIVE = SimpleNamespace(
    config=SimpleNamespace(training=SimpleNamespace(log_every=6, precision="bf16")),
    backbone=SimpleNamespace(num_tokens=TOKENS),
    counts_whole_step=True,
    flops_per_image=lambda: 1e9,
    fp8_share=lambda: 0.0,
)


def test_saves_and_writing_of_metrics_do_not_count(monkeypatch):
    now, stalled = 0.0, 0.0
    monkeypatch.setattr(callback, "time", SimpleNamespace(perf_counter=lambda: now))
    log, found = LogMetrics(OBJECTIVE, stalled=lambda: stalled), []
    for step in range(1, 19):
        now += 100 if step == 1 else 2
        state = StepState(step, 18, torch.tensor(1.0), ENGINE)
        log(state)
        if state.record:
            found.append((state.record["samples_per_s"], state.record["tokens_per_s"]))
            now += 1000  # validation, pictures, metrics
        if step % 3 == 0:  # a checkpoint, also between logged steps
            now, stalled = now + 10, stalled + 10
        log.restart_clock(state)
    assert found == [(BATCH / 2, TOKENS * BATCH / 2)] * 3
