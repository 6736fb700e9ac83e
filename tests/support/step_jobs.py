"""Steps of an engine in worker processes, and what they cost the host."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    config = load_config(path, words).config
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        run.task.start(engine)
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


@dataclass(frozen=True)
class Collectives:
    """Collectives of a step: of hidden states by name, and the number of those of small tensors."""

    big: Counter[str]
    tiny: int


class _Counting(TorchDispatchMode):
    """Records the collectives of torch.distributed, whoever calls them, with their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.name()
        if name.startswith("c10d::"):
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.found.append((name.removeprefix("c10d::").strip("_"), max(sizes)))
        return function(*args, **(kwargs or {}))


def collectives(launch: Launch, path: str, words: list[str]) -> Collectives:
    """Count the collectives of the second step: the first creates states."""
    config = load_config(path, words).config
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        run.task.start(engine)
        with run.loader(engine) as loader:
            engine.train_step(loader, 0)
            with _Counting() as counting:
                engine.train_step(loader, 1)
    width = config.model.hidden_size * engine.micro_batch_size
    big = Counter(name for name, size in counting.found if size > width)
    return Collectives(big, len(counting.found) - big.total())
