"""Jobs for worker processes: save in one layout, resume in another from every saved layout."""

from pathlib import Path

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.state.restore import load_training_state
from megavis.checkpoint.state.save import Snapshot, TrainingProgress
from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer

SAVED_STEP = 2
STEPS = 3


def save_and_continue(launch: Launch, path: str, words: list[str], folder: Path) -> list[float]:
    """Train, save after `SAVED_STEP`, continue; return the losses of later steps."""
    config = load_config(path, words).config
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        take_steps(run, engine, range(SAVED_STEP))
        save(run, engine, folder)
        return take_steps(run, engine, range(SAVED_STEP, STEPS))


def resume_from_each(
    launch: Launch, path: str, words: list[str], saved: dict[str, Path], output: Path
) -> dict[str, list[float]]:
    """Load each run into a new engine, save it again, continue; return the losses by run."""
    config = load_config(path, words).config
    losses = {}
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        for name, folder in saved.items():
            engine = Engine(run.objective)
            checkpoint = latest_checkpoint(folder)
            assert checkpoint is not None
            load_training_state(checkpoint, engine.states)
            save(run, engine, output / name)
            losses[name] = take_steps(run, engine, range(SAVED_STEP, STEPS))
    return losses


def take_steps(run: Trainer, engine: Engine, steps: range) -> list[float]:
    """Train for the given steps; return their losses."""
    loader = run.loader(engine, steps.start)
    with loader:
        return [engine.mean_over_data(engine.train_step(loader, step)) for step in steps]


def save(run: Trainer, engine: Engine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    progress = TrainingProgress(
        step=SAVED_STEP, samples_seen=0, seed=run.config.seed, tokenizer=run.tokenizer
    )
    snapshot = Snapshot(folder, progress, engine.states)
    snapshot.write()
    snapshot.publish()
