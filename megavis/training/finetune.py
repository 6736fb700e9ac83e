"""Fine-tuning around the training loop: initial weights, model selection, and the report.

The step is selected on one set of images and measured on another, the test images: those of
`finetune.test`, or a random half of the validation images, the same half in every run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megavis.checkpoint.format.folder import step_folder
from megavis.checkpoint.state.load import load_weights, start_from_weights
from megavis.composition.classification import Classification
from megavis.config.errors import UserError
from megavis.config.load import LoadedConfig
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.leakage import refuse_overlap
from megavis.data.loading.subset import Subset, halves, shuffled
from megavis.evaluation.classes import ClassResult, evaluate_classifier
from megavis.evaluation.figures import draw_confusion, write_png
from megavis.evaluation.networks import NUM_VIEWS
from megavis.evaluation.trained_on import training_shards
from megavis.model.inference import Inference
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.early_stopping import EarlyStopping
from megavis.training.engine import Engine
from megavis.training.finetune_checks import check_source, label_issues, source_checkpoint
from megavis.training.open_data import open_held_out


@dataclass
class Finetuning:
    """The side of a training run that knows of classes.

    Attributes:
        objective: the paper with classes.
        folder: of the run.
        class_names: of the shards.
        num_train: images in the training shards.
        selection: images that choose the step.
        test: images that measure it.
        stopping: what the run has seen so far.
    """

    objective: Classification
    folder: Path
    class_names: tuple[str, ...]
    num_train: int
    selection: Subset
    test: Subset
    stopping: EarlyStopping

    @classmethod
    def open(
        cls,
        loaded: LoadedConfig,
        objective: Classification,
        train: Samples,
        validation: ShardDataset,
    ) -> Finetuning:
        """Check source and labels, and split selection from test images.

        Raises:
            UserError: with the key and its line, when something does not fit.
        """
        settings = objective.settings
        if settings.from_run is not None:
            check_source(loaded, objective, train)
        test = None
        if settings.test is not None:
            test = open_held_out(loaded, "finetune.test", settings.test, objective, train)
        datasets = {"data.train": train, "data.validation": validation, "finetune.test": test}
        for key, dataset in datasets.items():
            if dataset is not None:
                complaints = list(label_issues(key, dataset, settings, train.class_names))
                if complaints:
                    raise loaded.source.error(complaints)
        _refuse_overlap(loaded, validation, test)
        parts = halves(validation) if test is None else (shuffled(validation), shuffled(test))
        folder = Path(loaded.config.folder)
        stopping = EarlyStopping(settings.patience)
        return cls(objective, folder, train.class_names, len(train), *parts, stopping)

    def resume(self, step: int, context: ParallelContext) -> None:
        """Remember what the run had seen when it had taken so many steps."""
        patience = self.objective.settings.patience
        self.stopping = EarlyStopping.resume(patience, self.folder, step, context)

    def start(self, engine: Engine) -> None:
        """Give the model the other run's weights, if there is one."""
        if self.objective.settings.from_run is not None:
            start_from_weights(
                source_checkpoint(self.objective.settings),
                layers=engine.layers,
                states=engine.states,
                context=engine.context,
            )

    def finish(self, engine: Engine) -> None:
        """Let the best checkpoint name all classes; write and print, unless that was done.

        The engine's weights are the checkpoint's afterwards: training cannot go on.
        """
        step = self.stopping.best_step
        paths = {part: self.folder / "evaluation" / f"finetune_{part}.json" for part in _PARTS}
        if step is None or all(path.exists() for path in paths.values()):
            return
        load_weights(step_folder(self.folder, step), engine.layers, engine.context)
        for part, path in paths.items():
            result = self._result(engine, getattr(self, part))
            if engine.context.is_main:
                self._write(result, path, part, step)

    def _result(self, engine: Engine, dataset: Subset) -> ClassResult:
        objective = self.objective
        return evaluate_classifier(
            Inference(engine.layers, engine.context),
            objective,
            dataset,
            num_views=NUM_VIEWS if objective.has_random_sequence else 1,
            batch_size=engine.micro_batch_size,
        )

    def _write(self, result: ClassResult, path: Path, part: str, step: int) -> None:
        data = str(getattr(self, part).directory)
        record = {"step": step, "part": part, "data": data, **self._hyper_parameters()}
        result.write(path, class_names=self.class_names, **record)
        title = f"step {step}: {result.vote:.1%} of {result.num_images} {part} images"
        picture = draw_confusion(result.confusion, self.class_names, title=title)
        write_png(path.with_suffix(".png"), picture)
        views = result.num_views
        vote = f", {result.vote:.1%} by the vote of {views} draws" if views > 1 else ""
        sys.stdout.write(
            f"{part}, best step {step}: top-1 {result.top1:.1%}{vote}, top-5 {result.top5:.1%}"
            f" of {result.num_images} images, {path}\n"
        )
        sys.stdout.flush()

    def _hyper_parameters(self) -> dict[str, Any]:
        """Return what an accuracy depends on besides the run's weights at the start."""
        config = self.objective.config
        return {
            "seed": config.seed,
            "train": [source.path for source in config.data.train_sources],
            "num_train": self.num_train,
            "batch_size": config.training.batch_size,
            "optimizer": config.optimizer.model_dump(mode="json"),
            "finetune": self.objective.settings.model_dump(mode="json"),
        }


def _refuse_overlap(
    loaded: LoadedConfig, validation: ShardDataset, test: ShardDataset | None
) -> None:
    """Refuse images that judge if this run or its source was trained on them, or if they choose."""
    key, judging = ("data.validation", validation) if test is None else ("finetune.test", test)
    try:
        refuse_overlap(judging, training_shards(loaded.config))
        if test is not None:
            refuse_overlap(test, [validation])
    except UserError as error:
        raise loaded.source.error([(key, str(error))]) from None


_PARTS = ("selection", "test")
