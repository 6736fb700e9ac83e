"""Results of `transfer` as one table: Markdown, and CSV with every field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from megavis.data.format.files import write_atomically
from megavis.evaluation.figures import Row, write_table
from megavis.evaluation.transfer import OPTION, TransferResult, TransferScore

_HEADER = (
    "data set",
    "features",
    "top-1, %",
    "mean of classes, %",
    "labels",
    "layer",
    "penalty",
    "held-out, %",
    "train + held out",
    "test",
    "classes",
)


def rows_of(results: Sequence[TransferResult], *, step: int, seed: int) -> list[Row]:
    """Return one row a classifier, shares in [0, 1]; what does not apply is empty."""
    return [
        {
            "data_set": result.data_set,
            "features": result.features,
            "step": step,
            "seed": seed,
            **{key: "" if value is None else value for key, value in vars(score).items()},
            "num_train": result.num_train,
            "num_held_out": result.num_held_out,
            "num_test": result.num_test,
            "num_equal": "" if result.num_equal is None else result.num_equal,
            "num_classes": result.num_classes,
            "train": result.splits["train"],
            "selection": result.splits.get("selection", ""),
            "test": result.splits["test"],
        }
        for result in results
        for score in result.scores
    ]


def markdown_of(results: Sequence[TransferResult], *, title: str) -> str:
    """Return the table with its title, the mean over data sets, and which images these are."""
    lines = [_cells(_HEADER), _cells(["---"] * len(_HEADER))]
    lines += [_cells(_row(result, score)) for result in results for score in result.scores]
    lines += _means(results)
    return "\n".join([title, "", *lines, "", *_footnotes(results)]) + "\n"


def write_transfer(
    folder: Path, results: Sequence[TransferResult], *, title: str, step: int, seed: int
) -> list[Path]:
    """Write `transfer.md` and `transfer.csv`; returns both. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    readable = folder / "transfer.md"
    write_atomically(readable, markdown_of(results, title=title).encode())
    return [readable, write_table(folder / "transfer.csv", rows_of(results, step=step, seed=seed))]


def _means(results: Sequence[TransferResult]) -> Iterator[str]:
    """Yield the mean over several data sets for all features that each was seen by."""
    data_sets = dict.fromkeys(result.data_set for result in results)
    for features in dict.fromkeys(result.features for result in results):
        own = [result.scores[0].accuracy for result in results if result.features == features]
        if len(own) == len(data_sets) > 1:
            cells = ["mean of the best layers", features, f"{100 * fmean(own):.1f}"]
            yield _cells([*cells, *[""] * (len(_HEADER) - len(cells))])


def _row(result: TransferResult, score: TransferScore) -> list[str]:
    few = score.deviation is not None
    spread = f" ± {100 * score.deviation:.1f}" if score.deviation is not None else ""
    fitted = result.num_train - result.num_held_out
    return [
        result.data_set,
        result.features,
        f"{100 * score.accuracy:.1f}{spread}",
        _percent(score.class_accuracy),
        score.labels,
        f"{score.layer}" + (" (given)" if score.layer_from == OPTION else ""),
        "by draw" if score.penalty is None else f"{score.penalty:g}",
        _percent(score.selection_accuracy),
        "" if few else f"{fitted} + {result.num_held_out}",
        str(result.num_test),
        str(result.num_classes),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _footnotes(results: Sequence[TransferResult]) -> Iterator[str]:
    for name, splits in {result.data_set: result.splits for result in results}.items():
        images = "; ".join(f"{part}: {what}" for part, what in splits.items())
        yield f"- {name}: {images}"
