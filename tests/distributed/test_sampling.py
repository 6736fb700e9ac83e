"""Samples of an engine in training and of a saved run are the same in every layout."""

from pathlib import Path

import pytest
import torch

from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.loader import BatchLoader
from megavis.model.inference import Inference
from megavis.notebook import Run
from megavis.papers import OBJECTIVES
from megavis.parallel.context import close_context, open_context
from megavis.sampling.sampler import Sampler
from megavis.training.engine import Engine
from megavis.training.job import open_job

# Other versions of Megatron-Core are covered by the tests of training.
pytestmark = pytest.mark.once
STEPS = 4
LAYOUTS = [
    # Number of processes, overrides.
    (
        2,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "parallel.zero_stage=1",
        ],
    ),
    (2, ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=0"]),
    (4, ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=3"]),
    (4, ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=3"]),
    (2, ["parallel.context_parallel_size=2", "parallel.zero_stage=3"]),
]


def sample_after_training(launch, path, overrides, options=None):
    """Train a few steps, sample 5 images, complete 5, and train another step."""
    config = load_config(path, overrides).config
    with open_job(config, launch, device="cpu") as context:
        objective = OBJECTIVES[config.objective.name](config, context)
        engine = Engine(objective)
        dataset = ShardDataset(config.data.train)
        originals = torch.from_numpy(dataset.read(range(5))[0].astype("int64"))
        loader = BatchLoader(
            dataset,
            seed=0,
            micro_batch_size=engine.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            accumulation_steps=engine.accumulation_steps,
        )
        with loader:
            losses = [engine.train_step(loader, step) for step in range(STEPS)]
            inference = Inference(engine.layers, context)
            assert inference.is_alone == (launch.world_size == 1)
            sampler = Sampler(inference, objective, Path(), options, seed=3)
            completed = sampler.sample(5, originals=originals, num_given=48, batch_size=3)
            ids = torch.cat([sampler.sample(5), completed])
            losses.append(engine.train_step(loader, STEPS))
        return ids.tolist(), [engine.mean_over_data(loss) for loss in losses]


def sample_saved(launch, run_folder, tensor_size):
    """Open a run inside a job and sample 5 images."""
    open_context(launch, ParallelConfig(tensor_model_parallel_size=tensor_size), device="cpu")
    try:
        return Run.open(run_folder).sample(5, seed=3, top_p=0.9, tokens=True).tolist()
    finally:
        close_context()


@pytest.fixture(scope="module")
def path(tiny_config):
    return str(tiny_config)


FAST = ["optimizer.learning_rate=3e-2", "schedule.warmup_steps=0"]


def test_samples_are_the_same_in_every_layout(run_job, path):
    words = [*FAST, "parallel.zero_stage=0"]
    [(expected, losses)] = run_job(sample_after_training, 1, path, words)
    assert len({tuple(row) for row in expected}) == 10

    for num_processes, layout in LAYOUTS:
        results = run_job(sample_after_training, num_processes, path, FAST + layout)
        for ids, other_losses in results:
            assert ids == expected, layout
            assert other_losses == pytest.approx(losses, rel=1e-4), layout


def test_rounds_sample_the_same_in_every_layout(run_job, path):
    """Places are asked for together, and the cache forgets rows, on all processes alike."""
    objective = (
        "objective={name: compose, reads: {kind: colors, vocabulary_size: 64},"
        " schedule: {kind: one_by_one, order: random}, asks: {kind: instruct},"
        " density: {kind: categorical}}"
    )
    words, options = [*FAST, objective, "model.positions=rope_2d"], {"rounds": 7}
    one = [*words, "parallel.zero_stage=0"]
    [(expected, losses)] = run_job(sample_after_training, 1, path, one, options)
    for num_processes, layout in (LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]):
        results = run_job(sample_after_training, num_processes, path, words + layout, options)
        for ids, other_losses in results:
            assert ids == expected, layout
            assert other_losses == pytest.approx(losses, rel=1e-4), layout


def test_saved_run_is_sampled_on_several_ranks(run_job, path, tmp_path):
    from run_jobs import train_run

    words = [*FAST, f"output={tmp_path}", "parallel.zero_stage=1"]
    run_job(train_run, 2, path, words)
    folder = str(tmp_path / "tiny")

    [expected] = run_job(sample_saved, 1, folder, 1)

    for num_processes, tensor_size in ((2, 1), (2, 2), (4, 2)):
        for ids in run_job(sample_saved, num_processes, folder, tensor_size):
            assert ids == expected
