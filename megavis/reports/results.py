"""Sections of a page for the files of `RUN/evaluation/`.

`KNOWN_RESULTS` shows the files that commands write; other JSON files are shown as tables. Each of
its functions takes the run and the content of a file, and yields blocks. It raises KeyError,
TypeError, IndexError or ValueError if the file is not in the format that its command writes.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megavis.data.format.files import from_json
from megavis.reports.blocks import (
    Block,
    Chart,
    Confusion,
    Line,
    PageSection,
    Table,
    csv_table,
    line_chart,
    markdown_table,
    number,
    percent,
    picture,
    tables_of,
    text,
    words,
)
from megavis.reports.run_record import RunRecord, eval_metrics
from megavis.training.metrics import read_json_lines

_SHOWN = (".json", ".jsonl", ".csv", ".md", ".png")
_FIGURES = {
    "attention": "Attention by head",
    "completions": "Lower halves from upper ones",
    "correlation": "Similarity of tokens by distance",
    "depth": "Linear probe by layer",
    "groups": "Hidden patches, group by group",
    "jigsaw": "Images reassembled from predicted positions",
    "likelihood": "Accuracy over validation loss",
    "mixture": "Mixed patches of two images, reassembled",
    "neighbors": "Nearest neighbours by layer",
    "patches": "Prediction error by position",
    "positions": "Accuracy of predicted positions by mask ratio",
    "reconstructions": "Hidden patches predicted from the visible ones",
}
_HEADINGS = {
    "probe": "Linear probe",
    "finetune_selection": "Fine-tuning: selection images",
    "finetune_test": "Fine-tuning: test images",
    "likelihood": "Likelihood",
    "samples": "Generated images",
    "transfer": "Linear probes on other data sets",
    "watch": "Checkpoints during training",
}
_FIRST = ("probe", "completions", "jigsaw", "groups", "reconstructions")


def metrics_table(run: RunRecord) -> Iterator[Table]:
    """Yield a table of all metrics except the probe's, which has a section of its own."""
    found = [measure for measure in eval_metrics(run.folder) if measure.group != "linear probe"]
    rows = [(f"{m.group}, {m.name}", f"{m.formatted} {m.note}".strip()) for m in found]
    if rows:
        yield Table("Metrics", ("", "value"), rows)


def first_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the main results: the probe and predictions of held-out images."""
    return _sections(run, lambda stem: stem in _FIRST)


def result_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the other sections in page order, and a list of other files."""
    yield from _sections(run, lambda stem: stem not in _FIRST)
    others = [path for path in run.results() if path.suffix not in _SHOWN]
    if others:
        rows = [(path.name, number(path.stat().st_size)) for path in others]
        yield PageSection(
            "Other files", [Table("", ("file", "bytes"), rows, str(others[0].parent))]
        )


def _sections(run: RunRecord, shows: Callable[[str], bool]) -> Iterator[PageSection]:
    """Yield a section for each name in `evaluation/`: JSON, CSV and picture."""
    files: dict[str, dict[str, Path]] = {}
    for path in run.results():
        if shows(path.stem):
            files.setdefault(path.stem, {})[path.suffix] = path
    for stem in sorted(files, key=lambda stem: ([*KNOWN_RESULTS, stem].index(stem), stem)):
        by_suffix = files[stem]
        try:
            blocks: Sequence[Block] = [*_blocks(run, stem, by_suffix)]
        except (ValueError, csv.Error) as error:
            blocks = [Table("", ("cannot be read",), [(str(error),)])]
        if blocks:
            yield PageSection(_heading(stem), blocks)


def _heading(stem: str) -> str:
    if stem in _HEADINGS:
        return _HEADINGS[stem]
    heading = words(_FIGURES.get(stem, stem)).replace("-", " ")
    return heading[:1].upper() + heading[1:]


def _blocks(run: RunRecord, stem: str, files: dict[str, Path]) -> Iterator[Block]:
    drawn = False
    if ".json" in files:
        content = from_json(files[".json"].read_text(encoding="utf-8"))
        blocks = _known_blocks(stem, run, content) or tables_of(content, title="")
        drawn = any(isinstance(block, Chart | Confusion) for block in blocks)
        yield from blocks
    if ".jsonl" in files:
        records = read_json_lines(files[".jsonl"])
        yield from _known_blocks(stem, run, records) or tables_of(records, title="")
    if ".md" in files:
        yield markdown_table(files[".md"])
    if ".png" in files and not drawn:
        # The section is named after another file.
        title = _FIGURES.get(stem, "") if stem in _HEADINGS else ""
        yield picture(files[".png"], title=title, on_white=True)
    if ".csv" in files:
        yield csv_table(files[".csv"])


def _known_blocks(stem: str, run: RunRecord, content: Any) -> list[Block]:
    """Return the blocks of a known file; none if it is unknown or has another format."""
    try:
        return list(KNOWN_RESULTS[stem](run, content)) if stem in KNOWN_RESULTS else []
    except (KeyError, TypeError, IndexError, ValueError):
        return []


_MOST_NAMES = 25
"""Most classes for which a confusion matrix is legible; with more, the PNG is shown."""


def _probe(run: RunRecord, result: dict[str, Any]) -> Iterator[Block]:
    """`megavis probe`: accuracy by depth, the best layer, concatenated layers, few labels."""
    data = _probed_on(run, result)
    if len(result["trained"]) > 1:
        yield _depth_chart(result, data)
    best, pixels = result["best_layer"], result["pixels"]
    rows = [
        (f"step {result['step']}, layer {best['layer']}", percent(best["accuracy"])),
        ("untrained network, best layer", percent(result["untrained_accuracy"])),
        ("raw pixels", percent(pixels["accuracy"])),
    ]
    if result["num_views"] > 1:
        vote = f"step {result['step']}, vote of {result['num_views']} masks"
        rows.insert(1, (vote, percent(best["vote_accuracy"])))
    rows += _concatenated(result.get("concatenated") or ())
    chosen = f"The layer was selected on {result['num_held_out']} other images."
    yield Table(
        "Best layer", ("features", "accuracy"), rows, f"{chosen} {data}", marked=frozenset({0})
    )
    if result.get("low_data"):
        yield _low_data(result, data)


def probed_shards(run: RunRecord, result: dict[str, Any]) -> str:
    """Return the validation shards of a probe; the run's if the result does not name any."""
    splits = result.get("splits") or {}
    return str(splits.get("validation") or run.setting("data.validation", ""))


def _probed_on(run: RunRecord, result: dict[str, Any]) -> str:
    where = probed_shards(run, result)
    return (
        f"{result['num_validation']} validation images{f' of {where}' if where else ''},"
        f" {result['num_classes']} classes; fitted on {result['num_fitted']}, seed"
        f" {result['seed']}."
    )


def _depth_chart(result: dict[str, Any], data: str) -> Block:
    layers = [score["layer"] for score in result["trained"]]
    lines = [Line(layers, _accuracies(result["trained"]), 0, f"step {result['step']}", marks=True)]
    networks = [_accuracies(scores) for scores in result["untrained"]]
    if networks:
        columns = list(zip(*networks, strict=True))
        mean = [sum(column) / len(column) for column in columns]
        band = [min(column) for column in columns], [max(column) for column in columns]
        name = f"untrained, mean and range of {len(networks)}"
        lines.append(Line(layers, mean, None, name, marks=True, band=band))
    pixels = 100 * result["pixels"]["accuracy"]
    lines.append(Line([layers[0], layers[-1]], [pixels] * 2, 1, "raw pixels", dashed=True))
    title = "Accuracy by depth"
    return line_chart(title, lines, x="layer", y="accuracy (%)", caption=data)


def _accuracies(scores: list[dict[str, Any]]) -> list[float]:
    return [100 * score["accuracy"] for score in scores]


def _concatenated(scores: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield accuracies of concatenated layers: trained, and the mean of untrained networks."""
    for features in dict.fromkeys(score["features"] for score in scores):
        own = [score for score in scores if score["features"] == features]
        layers = ", ".join(str(layer) for layer in own[0]["layers"])
        several = f", mean of {len(own)}" if len(own) > 1 else ""
        name = f"{features}, layers {layers} concatenated ({own[0]['num_features']}){several}"
        yield name, percent(fmean(score["accuracy"] for score in own))


def _low_data(result: dict[str, Any], data: str) -> Table:
    scores = result["low_data"]
    counts = sorted({score["images_per_class"] for score in scores})
    rows = []
    known = ("trained", "untrained", "pixels")
    for features in sorted({score["features"] for score in scores}, key=known.index):
        own = {s["images_per_class"]: s for s in scores if s["features"] == features}
        cells = [
            f"{100 * own[count]['mean']:.1f} ± {100 * own[count]['deviation']:.1f}"
            for count in counts
        ]
        rows.append((features, *cells))
    draws = len(scores[0]["accuracies"])
    title = f"Few labels: accuracy in %, mean ± standard deviation over {draws} draws"
    columns = ("features", *(f"{count} per class" for count in counts))
    return Table(title, columns, rows, data, marked=frozenset({0}))


def _classes(run: RunRecord, result: dict[str, Any]) -> Iterator[Block]:
    """Fine-tuning: accuracies and the confusion matrix."""
    rows = [("top-1", percent(result["top1"])), ("top-5", percent(result["top5"]))]
    if result["num_views"] > 1:
        rows.append((f"vote of {result['num_views']} draws", percent(result["vote"])))
    role = {"selection": "used to select the step", "test": "held out"}[result["part"]]
    caption = (
        f"{result['num_images']} images of {result['data']}, {role}; step {result['step']},"
        f" seed {run.setting('seed', '–')}."
    )
    yield Table("Accuracy", ("", "accuracy"), rows, caption)
    if len(result["class_names"]) <= _MOST_NAMES:
        yield Confusion(
            "Confusion",
            result["class_names"],
            result["confusion"],
            "Rows: class. Columns: prediction.",
        )


def _likelihood(run: RunRecord, result: dict[str, Any]) -> Iterator[Block]:
    """`megavis likelihood`: nats and bits per dimension and per image."""
    rows = [
        ("nats per dimension", f"{result['nats_per_dimension']:.4f}"),
        ("bits per dimension", f"{result['bits_per_dimension']:.4f}"),
        ("nats per image", number(result["nats_per_image"])),
    ]
    given = f", given {result['given']}" if result["given"] else ""
    caption = (
        f"A dimension is {result['dimension']}, {number(result['dimensions_per_image'])} per"
        f" image{given}. {number(result['num_images'])} images of {result['data']}; step"
        f" {result['step']}, {result['precision']}."
    )
    yield Table("Held-out images", ("", "mean of -log p"), rows, caption)


def _watch(run: RunRecord, records: list[dict[str, Any]]) -> Iterator[Block]:
    """`megavis evaluate watch`: each metric by checkpoint step."""
    records = sorted(records, key=lambda record: record["step"])
    last = records[-1]
    caption = (
        f"{text(last['validation_images'] or 'All')} validation images, classifiers fitted on"
        f" at most {text(last['train_images'])}, seed {last['seed']}."
    )
    for title, keys, unit, factor in _OVER_STEPS:
        lines = []
        for color, key in enumerate(keys):
            measured = [record for record in records if key in record]
            steps = [record["step"] for record in measured]
            values = [factor * record[key] for record in measured]
            if steps:
                name = words(key) if len(keys) > 1 else ""
                lines.append(Line(steps, values, color, name, marks=True))
        if lines:
            about = measured[-1].get("distance_of", "") if keys[0] in _DISTANCES else caption
            yield line_chart(title, lines, x="step", y=unit, caption=about)
    # Shown once, below the chart.
    numbers = [{k: v for k, v in record.items() if k != "distance_of"} for record in records]
    table = tables_of(numbers, title="Values")[0]
    yield dataclasses.replace(table, closed=True)


def _samples(run: RunRecord, result: dict[str, Any]) -> Iterator[Block]:
    """`megavis evaluate samples`: distances and the settings that qualify them."""
    network, samples, reference = (result[key] for key in ("network", "samples", "reference"))
    names = {"fid": "FID", "sfid": "sFID", "frechet_distance": result["title"]}
    numbers = {key: value for key, value in result.items() if isinstance(value, float)}
    rows = [(names.get(key, words(key)), number(value)) for key, value in numbers.items()]
    caption = (
        f"{samples['num_images']} images of {samples['source']}; reference {reference['source']}"
        f" {reference['sha256'][:8]} (N {text(reference['num_images'])}); network"
        f" {network['name']} {network['sha256'][:8]}, resize {network['resize']}."
    )
    if result["caution"]:
        caption += f" {result['caution'][:1].upper()}{result['caution'][1:]}."
    yield Table("Distance from real images", ("", "value"), rows, caption)


_OVER_STEPS = (
    ("Accuracy by step", ("probe_accuracy", "neighbors_accuracy"), "accuracy (%)", 100),
    ("Validation loss by step", ("validation_loss",), "loss", 1),
    ("FID by step", ("fid",), "FID", 1),
    ("Fréchet distance by step", ("frechet_distance",), "distance", 1),
)
_DISTANCES = ("fid", "frechet_distance")
KNOWN_RESULTS: dict[str, Callable[[RunRecord, Any], Iterator[Block]]] = {
    "probe": _probe,
    "likelihood": _likelihood,
    "samples": _samples,
    "watch": _watch,
    "finetune_test": _classes,
    "finetune_selection": _classes,
}
"""Functions by file name, in page order."""
