"""At ZeRO-1 in bf16 a gradient lives in float32 alone."""

import pytest

from megavis.config.load import load_config
from megavis.training.engine import Engine
from megavis.training.trainer import Trainer

pytestmark = pytest.mark.once


def test_gradients_are_freed_when_they_are_added_up(tiny_config, context):
    config = load_config(tiny_config, ["training.precision=bf16", "parallel.zero_stage=1"]).config
    run = Trainer.open(config, context)
    engine = Engine(run.objective)
    sums, kept = [], []
    plain = engine.deepspeed.optimizer.step

    def step(*words, **options):
        parameters = [p for _, p in engine.layers.named_parameters()]
        kept.extend(p.grad for p in parameters if p.grad is not None)
        sums.extend(p._hp_grad for p in parameters)
        return plain(*words, **options)

    engine.deepspeed.optimizer.step = step
    with run.loader(engine) as loader:
        engine.train_step(loader, 0)
    assert not kept
    assert all(each.dtype.itemsize == 4 for each in sums)
    assert len(sums) > 10
