"""Fine-tuning around the training loop: initial weights, model selection, and the report.

The source run is checked before training. The step is selected on one set of images and evaluated
on another, the test images: `finetune.test`, or a random half of the validation images,
the same half in every run.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megavis.checkpoint.format.folder import chosen_checkpoint, saved_steps, step_folder
from megavis.checkpoint.format.manifest import read_manifest
from megavis.checkpoint.state.restore import load_weights, start_from_weights
from megavis.composition.classification import Classification
from megavis.config.errors import UserError, blame, counted
from megavis.config.load import load_run_config
from megavis.config.schema import ConfigIssue, FinetuneConfig, RunConfig
from megavis.config.section import PositionKind, Section
from megavis.data.loading.blended_dataset import Samples
from megavis.data.loading.dataset import ShardDataset, Subset, halves, shuffled
from megavis.data.loading.leakage import check_no_overlap, training_shards
from megavis.evaluation.classes import evaluate_classifier
from megavis.evaluation.figures import draw_confusion, write_png
from megavis.evaluation.networks import NUM_VIEWS
from megavis.evaluation.results import ClassAccuracy, FinetuneResult, Part
from megavis.grammar.compose import in_same_words
from megavis.model.inference import Inference
from megavis.model.positions import interpolation
from megavis.parallel.context import ParallelContext
from megavis.training.callbacks.validation import EarlyStopping
from megavis.training.engine import Engine
from megavis.training.job import open_held_out

_PARTS: tuple[Part, ...] = ("selection", "test")
_MAY_DIFFER = re.compile(
    "positions|position_scale|features|feature_order|drop_path|.*dropout|tokens_decay|loss_average"
)
"""Keys of model and objective that do not change the meaning of weights."""


@dataclass
class Finetuning:
    """The classification side of a training run.

    Attributes:
        objective: the classification.
        folder: of the run.
        class_names: of the shards.
        num_train: images in the training shards.
        selection: images for selecting the step.
        test: images for evaluating it.
        stopping: early stopping, with accuracies so far.
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
        config: RunConfig,
        objective: Classification,
        train: Samples,
        validation: ShardDataset,
    ) -> Finetuning:
        """Check source and labels, and split selection from test images.

        Raises:
            UserError: something does not fit; names the key.
        """
        settings = objective.settings
        if settings.from_run is not None:
            check_source(config, objective, train)
        test = None
        if settings.test is not None:
            test = open_held_out(config.data, "finetune.test", settings.test, objective, train)
        datasets = {"data.train": train, "data.validation": validation, "finetune.test": test}
        for key, dataset in datasets.items():
            if dataset is not None:
                differences = list(label_issues(key, dataset, settings, train.class_names))
                if differences:
                    raise UserError.of(differences)
        _check_test_images(config, validation, test)
        parts = halves(validation) if test is None else (shuffled(validation), shuffled(test))
        folder = Path(config.folder)
        stopping = EarlyStopping(settings.patience)
        return cls(objective, folder, train.class_names, len(train), *parts, stopping)

    def resume(self, step: int, context: ParallelContext) -> None:
        """Restore the state after `step` steps; if training goes on, remove earlier results."""
        patience = self.objective.settings.patience
        self.stopping = EarlyStopping.resume(patience, self.folder, step, context)
        is_extended = step < self.objective.config.training.steps and not self.stopping.is_over
        if is_extended and context.is_main:
            for path in self._results.values():
                path.unlink(missing_ok=True)
                path.with_suffix(".png").unlink(missing_ok=True)

    @property
    def _results(self) -> dict[Part, Path]:
        """The result files by part."""
        return {part: self.folder / "evaluation" / f"finetune_{part}.json" for part in _PARTS}

    def start(self, engine: Engine) -> None:
        """Load the source run's weights, if there is one."""
        if self.objective.settings.from_run is not None:
            start_from_weights(
                source_checkpoint(self.objective.settings),
                layers=engine.layers,
                states=engine.states,
                context=engine.context,
            )

    def best_saved_step(self) -> int | None:
        """Return the best step that has a checkpoint; None if there is none yet."""
        return self.stopping.best_of(saved_steps(self.folder))

    def finish(self, engine: Engine) -> None:
        """Evaluate the best checkpoint; write and print the results, unless done before.

        The engine then holds that checkpoint's weights, so training cannot continue.
        """
        # The folder may appear older on another node.
        step, is_done = engine.context.from_main(
            (self.best_saved_step(), all(path.exists() for path in self._results.values()))
        )
        if step is None or is_done:
            return
        load_weights(step_folder(self.folder, step), engine.layers, engine.context)
        for part, path in self._results.items():
            result = self._result(engine, getattr(self, part))
            if engine.context.is_main:
                self._write(result, path, part, step)

    def _result(self, engine: Engine, dataset: Subset) -> ClassAccuracy:
        objective = self.objective
        return evaluate_classifier(
            Inference(engine.layers, engine.context),
            objective,
            dataset,
            num_views=NUM_VIEWS if objective.has_random_sequence else 1,
            batch_size=engine.micro_batch_size,
        )

    def _write(self, accuracy: ClassAccuracy, path: Path, part: Part, step: int) -> None:
        config = self.objective.config
        FinetuneResult(
            step=step,
            part=part,
            data=str(getattr(self, part).directory),
            seed=config.seed,
            train=tuple(source.path for source in config.data.train_sources),
            num_train=self.num_train,
            batch_size=config.training.batch_size,
            optimizer=config.optimizer.model_dump(mode="json"),
            finetune=self.objective.settings.model_dump(mode="json"),
            accuracy=accuracy,
            class_names=tuple(self.class_names),
        ).write(path)
        title = f"step {step}: {accuracy.vote:.1%} of {accuracy.num_images} {part} images"
        picture = draw_confusion(np.array(accuracy.confusion), self.class_names, title=title)
        write_png(path.with_suffix(".png"), picture)
        views = accuracy.num_views
        vote = f", {accuracy.vote:.1%} by the vote of {views} draws" if views > 1 else ""
        sys.stdout.write(
            f"{part}, best step {step}: top-1 {accuracy.top1:.1%}{vote}, top-5 {accuracy.top5:.1%}"
            f" of {accuracy.num_images} images, {path}\n"
        )
        sys.stdout.flush()


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
    return chosen_checkpoint(Path(settings.from_run), settings.from_step)


def check_source(config: RunConfig, objective: Classification, train: Samples) -> None:
    """Reject a source run with another architecture or other tokens.

    Args:
        config: one whose `finetune` section names a run.

    Raises:
        UserError: names the key.
    """
    settings = objective.settings
    with blame("finetune.from_run"):
        checkpoint = source_checkpoint(settings)
        source = load_run_config(Path(settings.from_run or ""))
        difference = next(_differences(source, config, objective), None)
        tokenizer = train.manifest.identity or objective.backbone.tokenizer_identity
        if difference is None and read_manifest(checkpoint).tokenizer != tokenizer:
            difference = f"was trained on other tokens than {train.directory} has"
        if difference is not None:
            raise UserError(f"{settings.from_run} {difference}")


def _differences(source: RunConfig, config: RunConfig, objective: Classification) -> Iterator[str]:
    """Yield differences that change the meaning of the source run's weights."""
    source, config = in_same_words(source, config)
    for section in ("objective", "model"):
        yield from _other_keys(getattr(source, section), getattr(config, section), section)
    if source.data.normalize_frames != config.data.normalize_frames:
        yield (
            f"was trained with data.normalize_frames {str(source.data.normalize_frames).lower()},"
            " which its weights depend on; set it to the same"
        )
    yield from _other_size(source, config, objective.paper.position_kind)
    if objective.paper.weights_need_their_seed and source.seed != config.seed:
        yield (
            f"was trained with seed {source.seed}, which its weights depend on; set seed to"
            f" {source.seed}, not {config.seed}"
        )


def _other_keys(source: Section, config: Section, name: str) -> Iterator[str]:
    """Compare two sections, key by key; a key that only one kind of section has counts as null."""
    for key in {**type(source).model_fields, **type(config).model_fields}:
        there, here = getattr(source, key, None), getattr(config, key, None)
        if there == here or _MAY_DIFFER.fullmatch(key) or key in config.sampling_keys:
            continue
        if isinstance(there, Section) and isinstance(here, Section):
            yield from _other_keys(there, here, f"{name}.{key}")
        else:
            yield (
                f"was trained with {name}.{key} {there}, and this config has {here}; fine-tuning"
                " keeps the architecture"
            )


def _other_size(source: RunConfig, config: RunConfig, position_kind: PositionKind) -> Iterator[str]:
    """Check that coordinates are interpolated if the image size differs from pre-training.

    Learned positions are resized on loading.
    """
    sizes = source.data.image_size, config.data.image_size
    # Spectrogram frames have no side, and their number may not change.
    if position_kind not in ("sincos", "learned_sincos", "rope_1d", "rope_2d") or not all(sizes):
        return
    scale = source.model.position_scale * interpolation(position_kind, *sizes)
    if not math.isclose(config.model.position_scale, scale, rel_tol=1e-3):
        yield (
            f"was trained on {sizes[0]}² pixels, and this config has {sizes[1]}²; set"
            f" model.position_scale to {scale:.6g}, which interpolates {position_kind} positions"
        )


_ADVICE = "write its shards with --classes-from, the folder of data.train"


def label_issues(
    key: str, dataset: Samples, settings: FinetuneConfig, class_names: tuple[str, ...]
) -> Iterator[ConfigIssue]:
    """Yield errors in the labels of a data set.

    Args:
        key: the config key of the data set.
        class_names: class names of the training shards.
    """
    where, missing = dataset.directory, int((dataset.labels < 0).sum())
    if missing:
        found = counted(missing, "image")
        yield key, f"{where} holds {found} without a label, of {len(dataset)} in all"
    elif len(dataset.class_names) != settings.num_classes:
        found = counted(len(dataset.class_names), "class", "classes")
        text = f"{where} has {found}; finetune.num_classes is {settings.num_classes}"
        yield key, text + _other_classes(dataset.class_names, class_names)
    elif dataset.class_names != class_names:
        text = f"{where} numbers its classes differently from data.train"
        yield key, text + (_other_classes(dataset.class_names, class_names) or f": {_ADVICE}")


def _other_classes(found: tuple[str, ...], known: tuple[str, ...]) -> str:
    """Return how the classes of a data set differ from data.train's, and what to do.

    Empty if they are the same.
    """
    unknown = [name for name in found if name not in known]
    missing = [name for name in known if name not in found]
    if unknown:
        return (
            f"; data.train has no class {unknown[0]!r}: remove its images, or add the class there"
        )
    if not missing:
        return ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"; it lacks {missing[0]!r}{more} of data.train: {_ADVICE}"
