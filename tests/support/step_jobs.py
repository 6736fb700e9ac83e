"""Steps of an engine in worker processes, and what they cost the host."""

from dataclasses import dataclass

from deepspeed.accelerator import get_accelerator

from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer


@dataclass(frozen=True)
class HostCosts:
    """Synchronizations with the device, and measurements that timers keep, after some steps."""

    synchronizations: int
    kept: int


def host_costs(launch: Launch, path: str, words: list[str], steps: int) -> HostCosts:
    """Train for some steps, without logging."""
    loaded = load_config(path, words)
    with open_job(loaded, launch, device="cpu") as context:
        run = Trainer.open(loaded, context)
        engine = Engine(loaded.config, run.objective, context)
        run.start(engine)
        accelerator = get_accelerator()
        calls: list[None] = []
        accelerator.synchronize = lambda *_: calls.append(None)
        try:
            with run.loader(engine) as loader:
                for step in range(steps):
                    engine.train_step(loader, step)
        finally:
            del accelerator.synchronize
        timers = engine.deepspeed.timers.get_timers()
        return HostCosts(len(calls), sum(len(each.event_timers) for each in timers.values()))
