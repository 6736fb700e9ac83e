"""The run folder of weights that were released without their data and their training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megavis.config.schema import ObjectiveConfig, RunConfig
    from megavis.tokenizers.palette import Palette


def imported_config(
    run_folder: Path,
    paper: ObjectiveConfig,
    *,
    image_size: int,
    validation: str | None = None,
    **sections: Any,
) -> RunConfig:
    """Return the config of an imported run; what it says of training is there for going on.

    Args:
        run_folder: gives the run its name.
        paper: the objective's section.
        image_size: side of the images in pixels.
        validation: folder of held-out shards, which a `finetune` section wants.
        **sections: further ones, such as `model`.
    """
    from megavis.config.data import DataConfig
    from megavis.config.schema import OptimizerConfig, RunConfig, TrainingConfig

    is_validated = validation is not None
    return RunConfig(
        name=run_folder.name,
        output=str(run_folder.parent),
        objective=paper,
        data=DataConfig(train="shards/train", validation=validation, image_size=image_size),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        training=TrainingConfig(steps=1, batch_size=128, validate_every=int(is_validated)),
        **sections,
    )


def write_run(
    run_folder: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    *,
    palette: Palette | None = None,
) -> None:
    """Write a new run folder with a checkpoint of step 0. Raises OSError."""
    from megavis.checkpoint.state.import_weights import write_weights
    from megavis.config.load import dump_config
    from megavis.data.format.manifest import PALETTE_NAME

    run_folder.mkdir(parents=True)
    (run_folder / "config.yaml").write_text(dump_config(config))
    if palette is not None:
        palette.save(run_folder / PALETTE_NAME)
    tokenizer = None if palette is None else palette.sha256
    write_weights(run_folder, weights, seed=config.seed, tokenizer=tokenizer)
