"""Fine-tuning in every kind of layout: curves, early stopping, linear evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from run_jobs import deterministic_metrics, rewind, train_run

from megavis.checkpoint.format.folder import latest_checkpoint, saved_steps
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.config.schema import RunConfig
from megavis.training.parity import train_briefly

STEPS = 4
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 3}),
    (2, {"tensor_model_parallel_size": 2, "zero_stage": 2, "sequence_parallel": True}),
    (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    (2, {"context_parallel_size": 2}),
]
JOINT = "finetune.generative_weight=0.5"
CLASSES = (
    "finetune.visibility=full",
    "finetune.read_out=last",
    "finetune.layer_decay=0.7",
    "finetune.drop_path=0.3",
)


@pytest.fixture(scope="module")
def config_path(run_job: Any, tiny_config: Path, tmp_path_factory: Any) -> Path:
    """A fine-tuning config that starts from a run saved with tensor size 2 and ZeRO-3."""
    root = tmp_path_factory.mktemp("finetune")
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=3"]
    run_job(train_run, 4, str(tiny_config), [f"output={root}", "name=source", *layout])
    path = root / "finetune.yaml"
    path.write_text(
        tiny_config.read_text() + f"finetune: {{from_run: {root}/source, num_classes: 10}}\n"
    )
    return path


def words(path: Path, *more: str) -> list[str]:
    return [f"output={path.parent}", "training.validate_every=2", "schedule.warmup_steps=2", *more]


@pytest.mark.parametrize("options", [(JOINT,), CLASSES], ids=["joint", "classes"])
def test_layouts_match_one_process(
    run_job: Any, config_path: Path, options: tuple[str, ...]
) -> None:
    config = make_config(config_path, *words(config_path, *options))
    reference = run_job(train_briefly, 1, config, STEPS)[0]
    # A zero classifier has the loss ln 10; the generative loss continues that of the source.
    generative = deterministic_metrics(config_path.parent / "source")[-1]["loss"]
    own = 0.5 * generative if JOINT in options else 0.0
    assert reference[0][0] == pytest.approx(2.302585 + own, rel=0.05 if own else 1e-5)
    for processes, layout in LAYOUTS:
        curves = run_job(train_briefly, processes, with_layout(config, **layout), STEPS)
        assert largest_difference(curves, reference) <= TOLERANCE, layout


def accuracies_of(folder: Path) -> dict[int, float]:
    """Return the accuracy of each validation by its step."""
    name, lines = "validation_accuracy", deterministic_metrics(folder)
    return {int(line["step"]): line[name] for line in lines if name in line}


@pytest.mark.once
def test_early_stopping_and_resuming_in_another_layout(run_job: Any, config_path: Path) -> None:
    # With a tiny learning rate accuracy soon stops improving.
    settings = ["optimizer.learning_rate=1e-9", "finetune.patience=2", "training.steps=30"]
    settings += ["checkpoint.every=4", "checkpoint.keep_last=1"]
    run_job(train_run, 1, str(config_path), words(config_path, *settings, "name=whole"))
    folder = config_path.parent / "whole"
    looks = accuracies_of(folder)
    last = max(looks)
    best = min(step for step in looks if step and looks[step] == max(list(looks.values())[1:]))
    assert last == best + 4 < 30
    assert saved_steps(folder) == [best, last]
    result = json.loads((folder / "evaluation" / "finetune_test.json").read_text())
    assert (result["step"], result["num_images"]) == (best, 20)
    assert sum(map(sum, result["confusion"])) == 20

    # Interrupted after its best step, the run resumes in another layout.
    broken = words(config_path, *settings, "name=broken")
    other = config_path.parent / "broken"
    rewind(folder, other, best)
    for path in (other / "evaluation").iterdir():
        path.unlink()
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
    run_job(train_run, 4, str(config_path), [*broken, *layout])
    assert accuracies_of(other) == pytest.approx(looks)
    again = json.loads((other / "evaluation" / "finetune_test.json").read_text())
    assert again["confusion"] == result["confusion"]

    # Starting a finished run does nothing.
    before = (other / "metrics.jsonl").read_text()
    run_job(train_run, 1, str(config_path), broken)
    assert (other / "metrics.jsonl").read_text() == before


LINEAR = (
    "finetune.linear_evaluation=true",
    "optimizer.algorithm=lars",
    "optimizer.learning_rate=6.4",
    "training.micro_batch_size=null",
)
ATTENTIVE = (*LINEAR, "finetune.read_out=attention", "finetune.average=2", "finetune.layer=3")


def _assert_layouts_match(run_job: Any, config: RunConfig, layouts: list[tuple[int, Any]]) -> None:
    reference = run_job(train_briefly, 1, config, STEPS)[0]
    for processes, layout in layouts:
        curves = run_job(train_briefly, processes, with_layout(config, **layout), STEPS)
        assert largest_difference(curves, reference) <= TOLERANCE, layout


@pytest.mark.once
def test_linear_evaluation_trains_the_classifier_only(run_job: Any, config_path: Path) -> None:
    config = make_config(config_path, *words(config_path, *LINEAR))
    split = (4, LAYOUTS[1][1] | {"zero_stage": 3})
    _assert_layouts_match(run_job, config, [(2, {"zero_stage": 2}), split])
    # Of the mean of two layers, whose tokens a query attends to.
    config = make_config(config_path, *words(config_path, *ATTENTIVE))
    _assert_layouts_match(run_job, config, [split, LAYOUTS[3]])
    # Frozen weights are unchanged, and running statistics are saved.
    settings = words(
        config_path, *LINEAR, "name=linear", "training.steps=4", "parallel.zero_stage=3"
    )
    run_job(train_run, 2, str(config_path), settings)
    before, after = (
        read_weights(latest_checkpoint(config_path.parent / name)) for name in ("source", "linear")
    )
    for name, value in after.items():
        assert torch.equal(before.get(name, value), value), name
    new = {name.removeprefix("head.classifier.") for name in after.keys() - before.keys()}
    assert new == {"linear.weight", "linear.bias", "standardize.mean", "standardize.variance"}
    assert after["head.classifier.standardize.mean"].any()
    assert (config_path.parent / "linear" / "evaluation" / "finetune_test.json").exists()


@pytest.mark.once
def test_partial_fine_tuning_trains_the_last_block_in_every_layout(
    run_job: Any, config_path: Path
) -> None:
    partial = ("finetune.tuned_blocks=1", "finetune.generative_weight=0")
    config = make_config(config_path, *words(config_path, *partial))
    _assert_layouts_match(run_job, config, [(2, {"zero_stage": 2}), LAYOUTS[1]])
    settings = words(
        config_path, *partial, "name=partial", "training.steps=4", "parallel.zero_stage=1"
    )
    run_job(train_run, 1, str(config_path), settings)
    before, after = (
        read_weights(latest_checkpoint(config_path.parent / name)) for name in ("source", "partial")
    )
    changed = {
        name
        for name, value in after.items()
        if name not in before or not torch.equal(before[name], value)
    }
    last = max(int(name.split(".")[1]) for name in after if name.startswith("blocks."))
    parts = {".".join(name.split(".")[:2]) for name in changed}
    assert parts == {f"blocks.{last}", "head.norm", "head.classifier"}
