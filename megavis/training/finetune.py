"""Fine-tuning around the training loop: initial weights, model selection, and the report.

The source run is checked before training. The step is selected on one set of images and evaluated
on another, the test images: `finetune.test`, or a random half of the validation images,
the same half in every run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megavis.checkpoint.format.folder import checkpoint_to_open, saved_steps, step_folder
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.state.restore import load_weights, start_from_weights
from megavis.composition.classification import Classification
from megavis.composition.finetuned import Finetuned
from megavis.composition.instances import Instances
from megavis.composition.segmentation import Segmentation
from megavis.config.errors import UserError, blame
from megavis.config.load import load_run_config
from megavis.config.schema import FinetuneConfig, RunConfig
from megavis.data.format.manifest import hold_other_samples
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.dataset import ShardDataset, Subset, halves, shuffled
from megavis.data.loading.labels import check_count, check_labels
from megavis.data.loading.leakage import check_no_overlap, training_shards
from megavis.data.loading.opening import ShardOpener
from megavis.evaluation import detection, segmentation
from megavis.evaluation.classes import evaluate_classifier
from megavis.evaluation.figures import plot_confusion, write_png
from megavis.evaluation.networks import NUM_VIEWS
from megavis.evaluation.results import (
    ClassAccuracy,
    DetectionAccuracy,
    FinetuneResult,
    Part,
    PixelAccuracy,
    share_or_dash,
)
from megavis.grammar.same_run import check_same_words, source_differences
from megavis.model.inference import Inference
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.validation import EarlyStopping, accuracy_history
from megavis.training.engine import Engine
from megavis.training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Accuracy = ClassAccuracy | PixelAccuracy | DetectionAccuracy


@dataclass
class Finetuning:
    """The part of a run that differs from pre-training (`Pretraining`).

    Attributes:
        objective: the model with the head of a task.
        folder: folder of the run.
        class_names: names of the shards' classes.
        num_train: images in the training shards.
        validation: images for selecting the step.
        test: images for evaluating it.
        stopping: early stopping, with accuracies so far.
    """

    objective: Finetuned
    folder: Path
    class_names: tuple[str, ...]
    num_train: int
    validation: Subset
    test: Subset
    stopping: EarlyStopping

    @classmethod
    def open(
        cls,
        objective: Finetuned,
        train: Samples,
        validation: ShardDataset,
        opener: ShardOpener,
    ) -> Finetuning:
        """Check source and labels, and split images for selecting the step from test images.

        Raises:
            UserError: something does not fit; names the key.
        """
        config, settings, test = objective.config, objective.settings, None
        if settings.from_run is not None:
            check_source(objective, train)
        if settings.test is not None:
            test = opener.held_out("finetune.test", settings.test, train)
        datasets = {"data.train": train, "data.validation": validation, "finetune.test": test}
        class_names = objective.classes_of(train.manifest)
        for key, dataset in datasets.items():
            if dataset is not None:
                if settings.task == "classes":
                    check_labels(key, dataset)
                found = objective.classes_of(dataset.manifest)
                check_count(key, dataset.directory, found, settings.num_classes)
        _check_test_images(config, validation, test)
        parts = halves(validation) if test is None else (shuffled(validation), shuffled(test))
        stopping = EarlyStopping(settings.patience)
        return cls(objective, config.folder, class_names, len(train), *parts, stopping)

    def check_results(self) -> None:
        """Raise UserError if accuracies of the run are of other images than `data.validation`."""
        path, folder = self._results["selection"], self.validation.directory
        other = "choose another name, or restore the folder"
        if path.exists():
            before: str | None = FinetuneResult.read(path).data
            use = f"with which this run has chosen its step ({path})"
            if self.objective.settings.task == "classes":
                other += f"; `megavis ensemble {self.folder} --images {folder}` classifies them"
        else:
            before = self._validated_on()
            use = "on which this run has measured its accuracies so far"
        if before is not None and hold_other_samples(before, folder):
            raise UserError(
                f"{folder} holds other images than {before}, {use}: {other}", key="data.validation"
            )

    def _validated_on(self) -> str | None:
        """Return the images of the accuracies with which a resumed run continues, if it has any."""
        resumes_at = max(saved_steps(self.folder), default=0)
        history = accuracy_history(read_metrics(self.folder))
        if not any(step <= resumes_at for step, _ in history):
            return None
        return load_run_config(self.folder).data.validation

    def resume(self, step: int, context: ParallelContext) -> None:
        """Restore the state after `step` steps; if training continues, remove earlier results."""
        patience = self.objective.settings.patience
        self.stopping = EarlyStopping.resume(patience, self.folder, step, context)
        is_extended = step < self.objective.config.training.steps and not self.stopping.is_over
        if is_extended:
            context.on_main(self._remove_results)

    def _remove_results(self) -> None:
        for path in self._results.values():
            path.unlink(missing_ok=True)
            path.with_suffix(".png").unlink(missing_ok=True)

    @property
    def _parts(self) -> dict[Part, Subset]:
        """The images by the name that results give them."""
        # Write the test result last: `is_finished` and `finetuned_step` treat it as the end.
        return {"selection": self.validation, "test": self.test}

    @property
    def _results(self) -> dict[Part, Path]:
        """The result files by part."""
        folder = self.folder / "evaluation"
        return {part: folder / f"finetune_{part}.json" for part in self._parts}

    def start(self, engine: Engine) -> None:
        """Load the source run's weights, if there is one; its head's too if it is the same."""
        config, settings = self.objective.config, self.objective.settings
        if settings.from_run is None:
            return
        checkpoint, source = source_checkpoint(settings), load_run_config(Path(settings.from_run))
        reason = _reason_for_new_head(source, config, checkpoint, self.class_names)
        if source.finetune is not None and engine.context.is_main:
            start = f"is new: {reason}" if reason else f"continues from {checkpoint}"
            sys.stdout.write(f"the head {start}\n")
            sys.stdout.flush()
        start_from_weights(checkpoint, engine.states, with_head=reason is None)

    def finish(self, engine: Engine) -> None:
        """Evaluate the best checkpoint; write and print the results, unless done before.

        The engine then holds that checkpoint's weights, so training cannot continue.
        """
        best = self.stopping.best_of(saved_steps(self.folder))
        is_done = all(path.exists() for path in self._results.values())
        # The folder may appear older on another node.
        step, is_done = engine.context.from_main((best, is_done))
        if step is None or is_done:
            return
        load_weights(step_folder(self.folder, step), engine.layers, engine.context)
        for part, path in self._results.items():
            result = self._result(engine, self._parts[part])
            picture = self._picture(engine, result, part, step)
            if engine.context.is_main:
                self._write(result, path, part, step)
                write_png(path.with_suffix(".png"), picture)

    def _result(self, engine: Engine, dataset: Subset) -> Accuracy:
        objective, batch_size = self.objective, engine.micro_batch_size
        inference = Inference(engine.layers, engine.context)
        if isinstance(objective, Segmentation):
            return segmentation.evaluate_segmentation(
                inference, objective, dataset, batch_size=batch_size
            )
        if isinstance(objective, Instances):
            return detection.evaluate_detection(
                inference, objective, dataset, batch_size=batch_size
            )
        assert isinstance(objective, Classification)
        return evaluate_classifier(
            inference,
            objective,
            dataset,
            num_views=NUM_VIEWS if objective.has_random_sequence else 1,
            batch_size=batch_size,
        )

    def _picture(self, engine: Engine, accuracy: Accuracy, part: Part, step: int) -> Figure:
        """Plot the confusion of classes, or some images with predictions; on every process."""
        where = f"of {accuracy.num_images} {part} images"
        if isinstance(accuracy, ClassAccuracy):
            title = f"step {step}: {accuracy.vote:.1%} {where}"
            return plot_confusion(np.array(accuracy.confusion), self.class_names, title=title)
        title = f"step {step}: {_measured(accuracy)} {where}"
        inference, shown = Inference(engine.layers, engine.context), self._parts[part]
        if isinstance(self.objective, Instances):
            return detection.plot_examples(
                inference, self.objective, shown, self.class_names, title=title
            )
        assert isinstance(self.objective, Segmentation)
        return segmentation.plot_examples(inference, self.objective, shown, title=title)

    def _write(self, accuracy: Accuracy, path: Path, part: Part, step: int) -> None:
        config = self.objective.config
        FinetuneResult(
            step=step,
            part=part,
            data=str(self._parts[part].directory),
            seed=config.seed,
            train=tuple(source.path for source in config.data.train_sources),
            num_train=self.num_train,
            batch_size=config.training.batch_size,
            optimizer=config.optimizer.model_dump(mode="json"),
            finetune=self.objective.settings.model_dump(mode="json"),
            accuracy=accuracy,
            class_names=tuple(self.class_names),
        ).write(path)
        found = f"{_measured(accuracy)} of {accuracy.num_images} images"
        sys.stdout.write(f"{part}, best step {step}: {found}, {path}\n")
        sys.stdout.flush()


def _measured(accuracy: Accuracy) -> str:
    """Return what was measured, in half a line."""
    if isinstance(accuracy, PixelAccuracy):
        return f"mIoU {accuracy.mean_iou:.1%}, pixels {accuracy.pixel_accuracy:.1%}"
    if isinstance(accuracy, DetectionAccuracy):
        box, mask = (share_or_dash(each.ap) for each in (accuracy.box, accuracy.mask))
        return f"box AP {box}, mask AP {mask}"
    views = accuracy.num_views
    vote = f", {accuracy.vote:.1%} by the vote of {views} draws" if views > 1 else ""
    return f"top-1 {accuracy.top1:.1%}{vote}, top-5 {accuracy.top5:.1%}"


def _check_test_images(
    config: RunConfig, validation: ShardDataset, test: ShardDataset | None
) -> None:
    """Reject test images that this run or its source was trained on, or that select the step."""
    key, judging = ("data.validation", validation) if test is None else ("finetune.test", test)
    with blame(key):
        check_no_overlap(judging, training_shards(config))
        if test is not None:
            check_no_overlap(test, [validation])


def source_checkpoint(settings: FinetuneConfig) -> Path:
    """Return the checkpoint that fine-tuning starts from; `from_run` names a run.

    Raises:
        UserError: there is no such run or checkpoint.
    """
    assert settings.from_run is not None
    return checkpoint_to_open(Path(settings.from_run), settings.from_step)


def _reason_for_new_head(
    source: RunConfig, config: RunConfig, checkpoint: Path, class_names: Sequence[str]
) -> str | None:
    """Return why the head of the source does not fit a run; None if it does.

    Args:
        checkpoint: of the source. Released weights record no names of classes.
        class_names: of the run.
    """
    if source.finetune is None:
        return "the source has none"
    for key, value in config.head.items():
        if source.head[key] != value:
            return f"the source has {key} {source.head[key]}, not {value}"
    known = read_manifest(checkpoint).classes
    if known and known != tuple(class_names):
        return "the classes of the source have other names"
    return None


def check_source(objective: Finetuned, train: Samples) -> None:
    """Reject a source run with another architecture, other tokens, or words that have changed.

    Raises:
        UserError: names the key.
    """
    settings = objective.settings
    with blame("finetune.from_run"):
        checkpoint = source_checkpoint(settings)
        source = load_run_config(Path(settings.from_run or ""))
        manifest = read_manifest(checkpoint)
        check_same_words(checkpoint, manifest.words, source)
        difference = next(source_differences(source, objective.config), None)
        stored, model = train.manifest.identity, objective.backbone
        # Without the paper's own loss, the tokens that it predicts are not made.
        reads_tokens = stored or model.reads.identity or model.condition.identity
        is_compared = reads_tokens or settings.generative_weight > 0
        tokenizer = stored or model.tokenizer_identity
        if difference is None and is_compared and manifest.tokenizer != tokenizer:
            difference = f"was trained on other tokens than {train.directory} has"
        if difference is not None:
            raise UserError(f"{settings.from_run} {difference}")
