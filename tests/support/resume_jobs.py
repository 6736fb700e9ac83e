"""Resuming in worker processes, and what it reads of the checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.format.tensor_reader import CheckpointReader
from megavis.checkpoint.state import restore
from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer


@dataclass(frozen=True)
class ResumeCosts:
    """Bytes that a process reads at resume, and bytes of float32 states that it keeps."""

    read: int
    kept: int


def resume_costs(launch: Launch, path: str, words: list[str], run_folder: str) -> ResumeCosts:
    """Load the newest checkpoint of a run into an engine of another layout."""
    readers: list[CheckpointReader] = []

    def opened(folder: Path) -> CheckpointReader:
        readers.append(CheckpointReader(folder))
        return readers[-1]

    config = load_config(path, words).config
    with open_job(config, launch, device="cpu") as context, pytest.MonkeyPatch.context() as patch:
        engine = Engine(Trainer.open(config, context).objective)
        patch.setattr(restore, "CheckpointReader", opened)
        restore.load_training_state(chosen_checkpoint(Path(run_folder)), engine.states)
        return ResumeCosts(readers[0].bytes_read, _kept(engine, config.parallel.zero_stage))


def _kept(engine: Engine, zero_stage: int) -> int:
    """Return the bytes of weights and two moments that the inner optimizer updates.

    And of the small weights that ZeRO-3 keeps whole.
    """
    optimizer = engine.deepspeed.optimizer
    if zero_stage == 3:
        masters = optimizer.fp32_partitioned_groups_flat
    else:
        inner = optimizer.optimizer if zero_stage else optimizer
        masters = [master for group in inner.param_groups for master in group["params"]]
    whole = 0
    if zero_stage == 3:
        parameters = [parameter for _, parameter in engine.layers.named_parameters()]
        whole = sum(
            each.ds_numel - each.ds_tensor.numel() for each in parameters if each.ds_persist
        )
    return 4 * (3 * sum(master.numel() for master in masters) + whole)
