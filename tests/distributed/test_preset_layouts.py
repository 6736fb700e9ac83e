"""The shipped layouts against one process: models of two blocks, on up to 8 processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from latent_shards import write_latent_shards
from layout_curves import TOLERANCE, largest_difference, make_config
from small_configs import SMALL

from docs.scripts.plans import planned
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.parallel.workers import WorkerPool
from megavis.training.parity import train_briefly

pytestmark = pytest.mark.once

STEPS, MOST = 3, 8


def layouts() -> list[Any]:
    """Return paper and `parallel` section of the shipped layouts, each pair once."""
    found = {}
    for path in planned():
        config = load_config(path).config
        parallel = cut_down(config.parallel)
        key = (config.objective.name, *parallel.model_dump().values())
        found.setdefault(key, pytest.param(key[0], parallel, id=path.stem))
    return list(found.values())


def cut_down(parallel: ParallelConfig) -> ParallelConfig:
    """Return the same kind of layout for two blocks on eight processes."""
    sizes = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
    }
    return parallel.model_copy(update={name: min(2, size) for name, size in sizes.items()})


@pytest.fixture(scope="module")
def folders(shards: Path, image_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    latents = tmp_path_factory.mktemp("presets") / "latents"
    write_latent_shards(latents, shape=(4, 4, 4), num_classes=3, num_images=60)
    return {
        "palette": f"{{train: {shards}/train, image_size: 8}}",
        "images": f"{{train: {image_shards}/train, image_size: 16}}",
        "latents": f"{{train: {latents}, image_size: 16}}",
    }


def small(paper: str, folders: Any, folder: Path) -> RunConfig:
    path = folder / "small.yaml"
    path.write_text(
        f"""\
name: small
output: {folder}/runs
objective: {SMALL[paper].objective}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  add_bias: true
data: {folders[SMALL[paper].data]}
optimizer: {{learning_rate: 1e-3}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 1}}
"""
    )
    return make_config(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Processes forked from the server that has imported everything."""
    with WorkerPool(MOST, preload=("megavis.training.trainer",)) as workers:
        yield workers


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("paper", "parallel"), layouts())
def test_shipped_layout_trains_as_one_process(
    pool: WorkerPool, folders: Any, tmp_path: Path, paper: str, parallel: ParallelConfig
) -> None:
    config = small(paper, folders, tmp_path)
    size = parallel.model_parallel_size
    (reference,) = pool.run(train_briefly, 1, config, STEPS)
    split = config.model_copy(update={"parallel": parallel})
    processes = max(size, min(2 * size, MOST))
    curves = pool.run(train_briefly, processes, split, STEPS)
    assert largest_difference(curves, reference) < TOLERANCE
