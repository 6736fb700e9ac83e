"""MAR in several layouts: training, samples in rounds with guidance, and a resume in another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from latent_shards import write_latent_shards
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from run_jobs import deterministic_metrics, rewind, train_run
from small_configs import SMALL

from megavis.config.schema import RunConfig
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader
from megavis.model.inference import Inference
from megavis.papers import OBJECTIVES
from megavis.parallel.launch import Launch
from megavis.sampling.sampler import Sampler
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.parity import Curve, train_briefly

pytestmark = pytest.mark.once

STEPS = 4
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 3}),
    (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 1}),
    (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 0}),
    (2, {"context_parallel_size": 2, "zero_stage": 3}),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config on random latents of three classes, which differ in their means."""
    folder = tmp_path_factory.mktemp("mar")
    write_latent_shards(folder / "train", shape=(4, 4, 4), num_classes=3, num_images=60)
    path = folder / "mar.yaml"
    path.write_text(
        f"""\
name: mar
output: {folder}/runs
objective: {SMALL["mar"].objective}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  add_bias: true
data: {{train: {folder}/train, image_size: 16}}
optimizer: {{learning_rate: 1e-3}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 2}}
"""
    )
    return path


def train_and_sample(launch: Launch, config: RunConfig) -> tuple[list[float], list[float]]:
    """Train a few steps; return losses, and the latents of five images made in three rounds."""
    with open_job(config, launch, device="cpu") as context:
        objective = OBJECTIVES[config.objective.name](config, context)
        engine = Engine(objective)
        with BatchLoader(
            ShardDataset(config.data.train),
            seed=0,
            micro_batch_size=engine.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            accumulation_steps=engine.accumulation_steps,
        ) as loader:
            losses = [engine.train_step(loader, step) for step in range(STEPS)]
        options = {"rounds": 3, "guidance": 1.0, "guidance_schedule": "linear"}
        sampler = Sampler(Inference(engine.layers, context), objective, Path(), options, seed=3)
        conditions = {"labels": torch.tensor([0, 1, 2, 0, 1])}
        latents = sampler.sample(5, conditions=conditions, batch_size=3)
        return [engine.mean_over_data(loss) for loss in losses], latents.flatten().tolist()


@pytest.fixture(scope="module")
def one_process(run_job: Any, path: Path) -> tuple[Curve, list[float]]:
    """Curve and samples of one process."""
    config = make_config(path)
    ((_, samples),) = run_job(train_and_sample, 1, config)
    return run_job(train_briefly, 1, config, STEPS)[0], samples


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS)
def test_layouts_train_and_sample_as_one_process(
    run_job: Any,
    path: Path,
    one_process: tuple[Curve, list[float]],
    processes: int,
    layout: dict[str, Any],
) -> None:
    config, (reference, expected) = make_config(path), one_process
    split = with_layout(config, **layout)
    curves = run_job(train_briefly, processes, split, STEPS)
    assert largest_difference(curves, reference) <= TOLERANCE
    for _, latents in run_job(train_and_sample, processes, split):
        # After so few steps denoising scales noise up.
        assert latents == pytest.approx(expected, rel=1e-4)


def test_a_run_resumes_in_another_layout(run_job: Any, path: Path, tmp_path: Path) -> None:
    """Two steps on one process, and two with tensor parallelism, are four on one."""
    words = [f"output={tmp_path}", "checkpoint.every=2", "training.log_every=1"]
    run_job(train_run, 1, str(path), ["name=whole", *words])
    rewind(tmp_path / "whole", tmp_path / "parts", 2)
    split = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    run_job(train_run, 2, str(path), ["name=parts", *split, *words])
    whole, parts = (
        [line["loss"] for line in deterministic_metrics(tmp_path / name) if "loss" in line]
        for name in ("whole", "parts")
    )
    assert parts[-2:] == pytest.approx(whole[-2:], abs=1e-5)
