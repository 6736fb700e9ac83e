"""Detection in worker processes."""

import torch

from megavis.config.schema import RunConfig
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer


def trained_in(launch: Launch, config: RunConfig) -> tuple[float, set[str], set[str]]:
    """Train one step; return the loss, and the types of weights and of the head's outputs."""
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        run.task.start(engine)
        outputs: set[str] = set()

        def note(_, __, losses) -> None:
            outputs.add(str(losses.dtype))

        engine.layers.modules[-1].register_forward_hook(note)
        with run.loader(engine) as loader:
            loss = engine.mean_over_data(engine.train_step(loader, 0))
        weights = {str(each.dtype) for _, each in engine.layers.named_parameters()}
        assert torch.isfinite(torch.tensor(loss))
        return float(loss), weights, outputs
