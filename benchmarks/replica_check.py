"""Cost of a check of `training.check_replicas_every`, relative to the steps between two checks.

    OMP_NUM_THREADS=1 python -m benchmarks.replica_check

A single process, without communication: the full check, its checksums of all weights and moments,
its two losses of one micro-batch, and a training step. `--micro-batch-size` divides a step into
micro-batches; the check uses one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.loader import make_shards
from benchmarks.timing import Taken, report, summary, take_turns
from benchmarks.twins import run_config, sized_parser, sizes
from megavis.config.schema import RunConfig
from megavis.parallel.context import ParallelContext, open_context
from megavis.parallel.launch import read_launch


def measure(
    config: RunConfig, shards: Path, context: ParallelContext, *, rounds: int
) -> dict[str, list[Taken]]:
    """Return the times of a step, of a check and of its two halves, in turns."""
    from megavis.data.loading.dataset import ShardDataset
    from megavis.data.loading.loader import BatchLoader
    from megavis.papers import OBJECTIVES
    from megavis.training.callbacks.callback import StepState
    from megavis.training.engine import Engine
    from megavis.training.faults.corruption_check import CheckReplicas, weight_fingerprints

    engine = Engine(OBJECTIVES["igpt"](config, context))
    dataset, last_step = ShardDataset(shards), config.training.steps
    look = CheckReplicas(
        every=1, saving=config.checkpoint, samples=dataset, seed=config.seed, batches_skipped=0
    )
    steps = iter(range(last_step))
    with BatchLoader(
        dataset,
        seed=config.seed,
        micro_batch_size=engine.micro_batch_size,
        data_parallel_rank=0,
        data_parallel_size=1,
        accumulation_steps=engine.accumulation_steps,
    ) as loader:
        loss = engine.train_step(loader, next(steps))
        return take_turns(
            {
                "step": lambda: float(engine.train_step(loader, next(steps))),
                "look": lambda: look(StepState(1, last_step, loss, engine)),
                "checksums": lambda: weight_fingerprints(engine),
                "two losses": lambda: look.losses(engine, 1),
            },
            rounds=rounds,
        )


def main() -> None:
    """Measure and report."""
    arguments = sized_parser(__doc__.splitlines()[0], batch_size=4)
    arguments.add_argument("--micro-batch-size", type=int, help="default: the whole batch")
    options = arguments.parse_args()
    config = run_config(options)
    training = config.training.model_copy(update={"micro_batch_size": options.micro_batch_size})
    config = config.model_copy(update={"training": training})
    with tempfile.TemporaryDirectory() as folder:
        shards = make_shards(Path(folder), options.image_size)
        context = open_context(read_launch({}), device="cpu")
        taken = measure(config, shards, context, rounds=options.rounds)
    report(summary(taken, against="step"), options.json, **sizes(config))


if __name__ == "__main__":
    main()
