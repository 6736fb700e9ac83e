"""The model card of an exported folder, from the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.format.manifest import read_manifest
from megavis.config.errors import UserError
from megavis.config.load import exported_names, with_tokenizers
from megavis.config.yaml_tree import dump_tree
from megavis.data.format.manifest import Manifest
from megavis.notebook import Run
from megavis.reports.run_record import RunRecord, eval_metrics

CARD = "README.md"


def model_card(
    run: Run,
    weights: Mapping[str, Tensor],
    *,
    library: str,
    task: str,
    use: str,
    limits: tuple[str, ...],
) -> str:
    """Return the card in Markdown.

    Args:
        library: the Hub's `library_name`.
        task: the Hub's `pipeline_tag`.
        use: Python code that opens the folder, which it calls `DIR`.
        limits: sentences about limitations of this format.
    """
    name, paper = run.config.name, run.config.objective.name
    total = sum(tensor.numel() for tensor in weights.values())
    head = {
        "library_name": library,
        "pipeline_tag": task,
        "license": "unknown",
        "tags": ["megavis", paper],
    }
    kind = "fine-tuned" if run.config.finetune is not None else "trained"
    record = _record(run)
    # Imported, and not trained since.
    is_released = run.step == 0 and record is None
    found = None if run.checkpoint is None else read_manifest(run.checkpoint).origin
    origin = (
        f"A run of `{paper}`, {kind} with megavis: {total:,} parameters after step {run.step:,}."
    )
    if is_released:
        origin = (
            f"Released weights, which megavis has not trained, as a run of `{paper}`: {total:,}"
            f" parameters. They came from {found or 'a place that was not recorded'}."
        )
    elif found is not None:
        origin += f" Its training began with released weights, which came from {found}."
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {name}\n",
        f"{origin}\n",
        f"## Use\n\n```python\n{use.strip()}\n```\n",
        "## Data\n",
        *_table(_data(run, is_released=is_released)),
        "## Training\n",
        *_table(_training(run, record, is_released=is_released)),
        "## Results\n",
        *_results(run, record),
        "## Licence\n",
        "Not stated. Before you publish these weights, check what the licence of the data allows,"
        " and put the licence here and into the header above.\n",
        "## Limits\n",
        *(f"- {sentence}" for sentence in (*limits, *_limits(run, is_released=is_released))),
        "\n## Config\n",
        f"```yaml\n{_config(run)}```",
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Iterator[tuple[str, object]]) -> Iterator[str]:
    yield "| | |\n|---|---|"
    for name, value in rows:
        yield f"| {name} | {value} |"
    yield ""


def _data(run: Run, *, is_released: bool) -> Iterator[tuple[str, object]]:
    data = run.config.data
    if is_released:
        yield "images", "not known to megavis: see where the weights were released"
        yield "side in pixels", data.image_size
        return
    for source in data.train_sources:
        path = Path(source.path)
        yield "shards", f"`{path.name}`"
        try:
            manifest = Manifest.read(path)
        except (UserError, OSError):
            continue  # The shards are not on this machine.
        yield "source", manifest.source.description
        yield "images", f"{manifest.num_samples:,}"
        if manifest.class_names:
            yield "classes", len(manifest.class_names)
    yield "side in pixels", data.image_size


def _training(
    run: Run, record: RunRecord | None, *, is_released: bool
) -> Iterator[tuple[str, object]]:
    training, optimizer = run.config.training, run.config.optimizer
    if is_released:
        yield "steps", "none with megavis; these keys of the config are for further training"
        return
    tuning = run.config.finetune
    if tuning is not None and tuning.from_run is not None:
        yield "starts from", _source(Path(tuning.from_run), tuning.from_step)
    yield "steps", f"{run.step:,} of {training.steps:,}" if training.steps else f"{run.step:,}"
    yield "batch", training.batch_size
    yield "precision", training.precision
    yield "optimizer", f"{optimizer.algorithm}, learning rate {optimizer.learning_rate:g}"
    for start in record.starts[-1:] if record is not None else ():
        versions = start.get("versions", {})
        yield "machine", start.get("machine", "")
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _source(folder: Path, step: int | None) -> str:
    """Return the name of a run, and where it came from if it was imported."""
    try:
        origin = read_manifest(chosen_checkpoint(folder, step)).origin
    except (UserError, OSError):
        origin = None  # The run is not on this machine.
    return f"`{folder.name}`" + (f", released weights: {origin}" if origin else "")


def _results(run: Run, record: RunRecord | None) -> Iterator[str]:
    rows: list[tuple[str, object]] = []
    if record is not None:
        for key in ("loss", "validation_loss"):
            steps, values = record.series(key)
            if values:
                rows.append((key.replace("_", " "), f"{values[-1]:.4g} at step {steps[-1]:,}"))
    for measure in eval_metrics(run.folder):
        is_other = measure.step not in (None, run.step)
        notes = [measure.note] * bool(measure.note) + [f"step {measure.step}"] * is_other
        note = f" ({', '.join(notes)})" if notes else ""
        rows.append((f"{measure.group}, {measure.name}", f"{measure.formatted}{note}"))
    if rows:
        yield from _table(iter(rows))
    else:
        yield "The run folder holds no measurements.\n"


def _limits(run: Run, *, is_released: bool) -> Iterator[str]:
    yield (
        "The numbers above are those that the run folder holds, on its own held-out data; nothing"
        " else was measured."
    )
    size = run.config.data.image_size
    if is_released:
        yield f"It reads images of {size} × {size} pixels; megavis does not know its training data."
    else:
        yield f"It has seen images of {size} × {size} pixels, of the data named above and no other."
    yield "The model inherits the biases of its data; nobody has looked for them here."


def _record(run: Run) -> RunRecord | None:
    """Return the run's records; None for an imported run, which was not trained here."""
    try:
        return RunRecord.read(run.folder)
    except UserError:
        return None


def _config(run: Run) -> str:
    """Return the config without paths of the machine that it ran on."""
    data = run.config.data
    train = [{**each.model_dump(), "path": Path(each.path).name} for each in data.train_sources]
    tree = with_tokenizers(run.config, exported_names(run.config)).model_dump(mode="json")
    tree["output"] = "runs"
    tree["data"]["train"] = train[0]["path"] if isinstance(data.train, str) else train
    if data.validation is not None:
        tree["data"]["validation"] = Path(data.validation).name
    return dump_tree(_named(tree))


def _named(value: Any) -> Any:
    """Return a tree with the names of files and folders for their absolute paths."""
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(each) for each in value]
    is_place = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_place else value
