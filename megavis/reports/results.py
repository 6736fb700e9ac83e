"""Sections of a page for the files of `RUN/evaluation/`.

`KNOWN_RESULTS` shows the files that commands write. Other JSON files are shown as tables, and so is
a file that has another form than its command writes, below a table that says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from megavis.data.format.files import from_json
from megavis.evaluation.figures import depth_rows
from megavis.evaluation.images.results import SamplesResult
from megavis.evaluation.results import (
    ConcatenatedScore,
    DetectionAccuracy,
    DetectionResult,
    FinetuneResult,
    LikelihoodResult,
    PixelAccuracy,
    ProbeResult,
    SegmentationResult,
    WatchedCheckpoint,
)
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
from megavis.reports.run_record import RunRecord, metrics_of
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
    "segmentation": "Classes of pixels",
    "detection": "Objects",
    "likelihood": "Likelihood",
    "samples": "Generated images",
    "transfer": "Linear probes on other data sets",
    "watch": "Checkpoints during training",
}
_FIRST = ("probe", "completions", "jigsaw", "groups", "reconstructions")


def metrics_table(run: RunRecord) -> Iterator[Table]:
    """Yield a table of all metrics except the probe's, which has a section of its own."""
    found = [each for each in metrics_of(run.results[0]) if each.group != "linear probe"]
    rows = [(f"{m.group}, {m.name}", f"{m.formatted} {m.note}".strip()) for m in found]
    if rows:
        yield Table("Metrics", ("", "value"), rows)


def first_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the main results: the probe and predictions of held-out images."""
    return _sections(run, lambda stem: stem in _FIRST)


def result_sections(run: RunRecord) -> Iterator[PageSection]:
    """Yield the other sections in page order, and a list of other files."""
    yield from _sections(run, lambda stem: stem not in _FIRST)
    others = [path for path in run.files if path.suffix not in _SHOWN]
    if others:
        rows = [(path.name, number(path.stat().st_size)) for path in others]
        yield PageSection(
            "Other files", [Table("", ("file", "bytes"), rows, str(others[0].parent))]
        )


def _sections(run: RunRecord, shows: Callable[[str], bool]) -> Iterator[PageSection]:
    """Yield a section for each name in `evaluation/`: JSON, CSV and picture."""
    files: dict[str, dict[str, Path]] = {}
    for path in run.files:
        if shows(path.stem):
            files.setdefault(path.stem, {})[path.suffix] = path
    for stem in sorted(files, key=lambda stem: ([*KNOWN_RESULTS, stem].index(stem), stem)):
        by_suffix = files[stem]
        blocks: list[Block] = []
        try:
            for block in _blocks(run, stem, by_suffix):
                blocks.append(block)
        except ValueError as error:
            blocks.append(_unreadable(error))
        if blocks:
            yield PageSection(_heading(stem), blocks)


def _unreadable(reason: object) -> Table:
    return Table("", ("cannot be read",), [(str(reason),)])


def _heading(stem: str) -> str:
    if stem in _HEADINGS:
        return _HEADINGS[stem]
    heading = words(_FIGURES.get(stem, stem)).replace("-", " ")
    return heading[:1].upper() + heading[1:]


def _blocks(run: RunRecord, stem: str, files: dict[str, Path]) -> Iterator[Block]:
    results, refused = run.results
    drawn = False
    for suffix, path in files.items():
        if path.name in refused:
            yield _unreadable(refused[path.name])
        if suffix in (".json", ".jsonl"):
            show = KNOWN_RESULTS.get(stem) if path.name in results else None
            found = show(run, results[path.name]) if show else tables_of(_content(path), title="")
            for block in found:
                drawn |= isinstance(block, Chart | Confusion)
                yield block
    if ".md" in files:
        yield markdown_table(files[".md"])
    if ".png" in files and not drawn:
        # The section is named after another file.
        title = _FIGURES.get(stem, "") if stem in _HEADINGS else ""
        yield picture(files[".png"], title=title, on_white=True)
    if ".csv" in files:
        yield csv_table(files[".csv"])


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return read_json_lines(path)
    return from_json(path.read_text(encoding="utf-8"))


_MOST_NAMES = 25
"""Most classes for which a confusion matrix is legible; with more, the PNG is shown."""


def _probe(run: RunRecord, result: ProbeResult) -> Iterator[Block]:
    """`megavis probe`: accuracy by depth, the best layer, concatenated layers, few labels."""
    data = (
        f"{result.num_validation} validation images of {result.splits['validation']},"
        f" {result.num_classes} classes; fitted on {result.num_fitted}, seed {result.seed}."
    )
    if len(result.trained) > 1:
        yield _depth_chart(result, data)
    best = result.best_layer
    rows = [
        (f"step {result.step}, layer {best.layer}", percent(best.accuracy)),
        ("untrained network, best layer", percent(result.untrained_accuracy)),
        ("raw pixels", percent(result.pixels.accuracy)),
    ]
    if result.num_views > 1:
        vote = f"step {result.step}, vote of {result.num_views} masks"
        rows.insert(1, (vote, percent(best.vote_accuracy)))
    rows += _concatenated(result.concatenated)
    chosen = f"The layer was selected on {result.num_held_out} other images."
    yield Table(
        "Best layer", ("features", "accuracy"), rows, f"{chosen} {data}", marked=frozenset({0})
    )
    if result.low_data:
        yield _low_data(result, data)


def _depth_chart(result: ProbeResult, data: str) -> Block:
    rows = depth_rows(result)
    columns = {key: [100 * row[key] for row in rows] for key in rows[0] if key != "trained_vote"}
    layers = [row["layer"] for row in rows]
    band = columns["untrained_lowest"], columns["untrained_highest"]
    name = f"untrained, mean and range of {len(result.untrained)}"
    ends, pixels = [layers[0], layers[-1]], columns["raw_pixels"][:2]
    lines = [
        Line(layers, columns["trained"], 0, f"step {result.step}", marks=True),
        Line(layers, columns["untrained_mean"], None, name, marks=True, band=band),
        Line(ends, pixels, 1, "raw pixels", dashed=True),
    ]
    title = "Accuracy by depth"
    return line_chart(title, lines, x="layer", y="accuracy (%)", caption=data)


def _concatenated(scores: Sequence[ConcatenatedScore]) -> Iterator[tuple[str, str]]:
    """Yield accuracies of concatenated layers: trained, and the mean of untrained networks."""
    for features in dict.fromkeys(score.features for score in scores):
        own = [score for score in scores if score.features == features]
        layers = ", ".join(str(layer) for layer in own[0].layers)
        several = f", mean of {len(own)}" if len(own) > 1 else ""
        name = f"{features}, layers {layers} concatenated ({own[0].num_features}){several}"
        yield name, percent(fmean(score.accuracy for score in own))


def _low_data(result: ProbeResult, data: str) -> Table:
    scores = result.low_data
    counts = sorted({score.images_per_class for score in scores})
    rows = []
    known = ("trained", "untrained", "pixels")
    for features in sorted({score.features for score in scores}, key=known.index):
        own = {s.images_per_class: s for s in scores if s.features == features}
        cells = [f"{100 * own[n].mean:.1f} ± {100 * own[n].deviation:.1f}" for n in counts]
        rows.append((features, *cells))
    draws = len(scores[0].accuracies)
    title = f"Few labels: accuracy in %, mean ± standard deviation over {draws} draws"
    columns = ("features", *(f"{count} per class" for count in counts))
    return Table(title, columns, rows, data, marked=frozenset({0}))


def _classes(run: RunRecord, result: FinetuneResult) -> Iterator[Block]:
    """Fine-tuning: accuracies and the confusion matrix."""
    found = result.accuracy
    if isinstance(found, DetectionAccuracy):
        yield from _objects(found, result.class_names, _caption(result))
        return
    if isinstance(found, PixelAccuracy):
        rows = _rows_of_pixels(found)
    else:
        rows = [("top-1", percent(found.top1)), ("top-5", percent(found.top5))]
        if found.num_views > 1:
            rows.append((f"vote of {found.num_views} draws", percent(found.vote)))
    yield Table("Accuracy", ("", "accuracy"), rows, _caption(result))
    if len(result.class_names) <= _MOST_NAMES:
        about = "Rows: class. Columns: prediction."
        yield Confusion("Confusion", result.class_names, found.confusion, about)


def _caption(result: FinetuneResult) -> str:
    role = {"selection": "used to select the step", "test": "held out"}[result.part]
    return (
        f"{result.accuracy.num_images} images of {result.data}, {role}; step {result.step},"
        f" seed {result.seed}."
    )


def _rows_of_pixels(found: PixelAccuracy) -> list[tuple[str, str]]:
    return [
        ("mean IoU", percent(found.mean_iou)),
        ("mean accuracy of classes", percent(found.mean_accuracy)),
        ("pixels", percent(found.pixel_accuracy)),
    ]


def _segmentation(run: RunRecord, result: SegmentationResult) -> Iterator[Block]:
    """`megavis evaluate segmentation`: whole images, and the IoU of each class."""
    found = result.accuracy
    caption = (
        f"{found.num_images} whole images of {result.data}, windows every {result.stride} pixels;"
        f" step {result.step}."
    )
    yield Table("Accuracy", ("", "value"), _rows_of_pixels(found), caption)
    pairs = zip(result.class_names, found.iou, strict=True)
    rows = [(name, percent(iou)) for name, iou in pairs]
    yield Table("IoU by class", ("class", "IoU"), rows)


def _detection(run: RunRecord, result: DetectionResult) -> Iterator[Block]:
    """`megavis evaluate detection`: COCO's numbers, and the average precision of each class."""
    caption = f"{result.accuracy.num_images} whole images of {result.data}; step {result.step}."
    yield from _objects(result.accuracy, result.class_names, caption)


def _objects(found: DetectionAccuracy, names: Sequence[str], caption: str) -> Iterator[Block]:
    columns = ("", "boxes", "masks")
    labels = {
        "ap": "AP",
        "ap50": "AP, IoU 0.5",
        "ap75": "AP, IoU 0.75",
        "ap_small": "AP, below 32² pixels",
        "ap_medium": "AP, up to 96² pixels",
        "ap_large": "AP, above 96² pixels",
        "ar1": "recall, 1 detection",
        "ar10": "recall, 10 detections",
        "ar100": "recall, 100 detections",
        "ar_small": "recall, below 32² pixels",
        "ar_medium": "recall, up to 96² pixels",
        "ar_large": "recall, above 96² pixels",
    }
    rows = [
        (label, *(percent(getattr(each, name)) for each in (found.box, found.mask)))
        for name, label in labels.items()
    ]
    yield Table("Average precision and recall", columns, rows, caption)
    by_class = zip(names, found.box.by_class, found.mask.by_class, strict=True)
    rows = [(name, percent(box), percent(mask)) for name, box, mask in by_class]
    yield Table("Average precision by class", ("class", "boxes", "masks"), rows)


def _likelihood(run: RunRecord, result: LikelihoodResult) -> Iterator[Block]:
    """`megavis likelihood`: nats and bits per dimension and per image."""
    rows = [
        ("nats per dimension", f"{result.nats_per_dimension:.4f}"),
        ("bits per dimension", f"{result.bits_per_dimension:.4f}"),
        ("nats per image", number(result.nats_per_image)),
    ]
    given = f", given {result.given}" if result.given else ""
    caption = (
        f"A dimension is {result.dimension}, {number(result.dimensions_per_image)} per"
        f" image{given}. {number(result.num_images)} images of {result.data}; step"
        f" {result.step}, {result.precision}."
    )
    yield Table("Held-out images", ("", "mean of -log p"), rows, caption)


def _watch(run: RunRecord, records: Sequence[WatchedCheckpoint]) -> Iterator[Block]:
    """`megavis evaluate watch`: each metric by checkpoint step."""
    newest, records = records, sorted(records, key=lambda record: record.step)
    if not records:
        return
    for title, keys, unit, factor in _OVER_STEPS:
        lines, about = [], ""
        for color, key in enumerate(keys):
            measured = _alike([record for record in newest if key in record.numbers])
            steps = [record.step for record in measured]
            values = [factor * record.numbers[key] for record in measured]
            if steps:
                name = words(key) if len(keys) > 1 else ""
                lines.append(Line(steps, values, color, name, marks=True))
                last = measured[-1]
                about = last.distance_of or "" if keys[0] in _DISTANCES else _of_watch(last)
        if lines:
            yield line_chart(title, lines, x="step", y=unit, caption=about)
    # Shown once, below the chart.
    numbers = [dataclasses.replace(record, distance_of=None).record() for record in records]
    table = tables_of(numbers, title="Values")[0]
    yield dataclasses.replace(table, closed=True)


def _alike(records: Sequence[WatchedCheckpoint]) -> list[WatchedCheckpoint]:
    """Return by step those with the options of the last one, which were measured alike."""
    alike = {each.step: each for each in records if each.settings == records[-1].settings}
    return [alike[step] for step in sorted(alike)]


def _of_watch(record: WatchedCheckpoint) -> str:
    return (
        f"{text(record.validation_images or 'All')} validation images, classifiers fitted on"
        f" at most {text(record.train_images)}, seed {record.seed}."
    )


def _samples(run: RunRecord, result: SamplesResult) -> Iterator[Block]:
    """`megavis evaluate samples`: distances and the settings that qualify them."""
    network, samples, reference = result.network, result.samples, result.reference
    names = {"fid": "FID", "sfid": "sFID", "frechet_distance": result.title}
    rows = [(names.get(key, words(key)), number(value)) for key, value in result.numbers.items()]
    caption = (
        f"{samples.num_images} images of {samples.source}; reference {reference.source}"
        f" {reference.sha256[:8]} (N {text(reference.num_images)}); network"
        f" {network}, resize {network.resize}."
    )
    if result.caution:
        caption += f" {result.caution[:1].upper()}{result.caution[1:]}."
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
    "segmentation": _segmentation,
    "detection": _detection,
}
"""Functions by file name, in page order."""
