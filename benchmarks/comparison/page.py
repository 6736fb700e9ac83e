"""The table of a study, with a strip of generated images in each row, and further pictures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.comparison.study import (
    IMAGES,
    RECONSTRUCTIONS,
    TOKENIZERS,
    Method,
    Study,
    tokenizer_run,
)
from benchmarks.results.tables import (
    best_layers,
    facts,
    filled,
    found,
    missing,
    percent,
    picture,
    processor_minutes,
    table,
    top1,
    write_parts,
)
from megavis.evaluation.images.results import ClassesResult
from megavis.evaluation.results import FinetuneResult, ProbeResult

PICTURES = Path("images/comparison")
"""Pictures, next to the page."""
_PROBE, _TUNED, _RECOGNISED = (
    Path("evaluation") / name for name in ("probe.json", "finetune_test.json", "classes.json")
)
_HEAD = (
    "",
    "images seen",
    "CPU minutes",
    "untrained",
    "linear probe",
    "fine-tuned",
    "recognised",
    "samples",
)
_IN_A_ROW, _SIDE = 8, 32


def write_page(study: Study, folder: Path, page: Path | None) -> list[Path]:
    """Write `comparison.md` with the pictures that it shows, and the parts of another page.

    Args:
        study: study whose runs are read, as far as they have finished.
        folder: folder of the study.
        page: also gets the parts and the pictures; None for no other page.

    Returns:
        The pages written.

    Raises:
        UserError: `page` lacks the marks of a part.
    """

    def parts_for(path: Path) -> dict[str, list[str]]:
        return {
            "letters": [*_rows(study, folder, path)],
            "pictures": [*_pictures(study, folder, path)],
        }

    return write_parts(folder / "comparison.md", page, parts_for, small=study.small)


def _rows(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield the table, a row for each method with a result."""
    names = dict.fromkeys(method.name for method in study.methods)
    of = {name: [each for each in study.methods if each.name == name] for name in names}
    rows = {name: _row(methods, study, folder, page) for name, methods in of.items()}
    found = [row for row in rows.values() if row is not None]
    if found:
        yield from facts(folder, [run for method in study.methods for run in method.runs])
        found += _references(list(of.values()), folder)
        yield from table(filled([list(_HEAD), *found]))
        yield ""
    yield from missing(name for name, row in rows.items() if row is None)


def _row(methods: Sequence[Method], study: Study, folder: Path, page: Path) -> list[str] | None:
    """Return the cells of a method, over the seeds that have a result; None without any."""
    probes = found(ProbeResult, folder, methods, _PROBE)
    tuned = found(FinetuneResult, folder, methods, _TUNED)
    if not probes and not tuned:
        return None
    recognised = found(ClassesResult, folder, methods, _RECOGNISED)
    seen = study.seen(methods[0])[: None if tuned else 1]
    each_run = zip(*(method.runs for method in methods), strict=True)
    times = [_mean_minutes(folder, runs) for runs in each_run][: len(seen)]
    return [
        methods[0].name,
        " + ".join(f"{number:,}" for number in seen),
        " + ".join(f"{number:.0f}" for number in times),
        percent([probe.untrained_accuracy for probe in probes], len(methods)),
        best_layers(probes, len(methods)),
        percent([top1(result) for result in tuned], len(methods)),
        percent([result.samples.overall for result in recognised], len(methods)),
        _strip(methods[0], folder, page),
    ]


def _mean_minutes(folder: Path, runs: Sequence[Path]) -> float:
    """Return the mean over the seeds that have been trained."""
    found = [minutes for run in runs if (minutes := processor_minutes(folder, run))]
    return statistics.fmean(found) if found else 0.0


def _references(methods: Sequence[Sequence[Method]], folder: Path) -> Iterator[list[str]]:
    """Yield rows to compare with: the probe of pixels, and real and reconstructed letters.

    Args:
        methods: the seeds of each method.
        folder: of the study.
    """
    of_images = [each for seeds in methods for each in seeds if each.reads == IMAGES]
    if probes := found(ProbeResult, folder, of_images, _PROBE):
        yield ["raw pixels", "", "", "", percent([probes[0].pixels.accuracy]), "", "", ""]
    real: list[str] | None = None
    for kind, name in TOKENIZERS.items():
        for seeds in (seeds for seeds in methods if seeds[0].kind == kind):
            results = found(ClassesResult, folder, seeds, _RECOGNISED)
            if not results:
                continue
            if real is None:
                shares = [result.real_images.overall for result in results]
                real = ["letters in unseen fonts", *[""] * 5, percent(shares, len(shares)), ""]
                yield real
            decoded = [each.reconstructions.overall for each in results if each.reconstructions]
            text = f"the same through the {name.upper()}"
            yield [text, "", "", "", "", "", percent(decoded, len(decoded)), ""]
            break


def _strip(method: Method, folder: Path, page: Path) -> str:
    """Return a cell with a method's first images, drawn next to the page.

    A strip that is already there, drawn by another machine, is shown too.
    """
    if not method.generates:
        return ""
    name = PICTURES / f"{method.pretrained.name}.png"
    if (folder / method.samples).exists():
        with np.load(folder / method.samples) as file:
            _draw_strip(file["arr_0"][:_IN_A_ROW], page.parent / name)
    return f"![{method.name}: samples]({name})" if (page.parent / name).exists() else ""


def _draw_strip(images: np.ndarray, path: Path) -> None:
    """Write images, uint8 `[b, h, w, 3]`, as a row with white lines between them."""
    factor = round(_SIDE / images.shape[1])
    enlarged = images.repeat(factor, axis=1).repeat(factor, axis=2)
    framed = np.pad(enlarged, ((0, 0), (0, 0), (0, 2), (0, 0)), constant_values=255)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate([*framed], axis=1)[:, :-2]).save(path)


def _pictures(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield pictures of the methods that have a figure, and of the tokenizers."""
    for method in (method for method in study.methods if method.figure):
        text = f"{method.name}: `megavis figure {method.figure}` of letters in unseen fonts"
        yield from picture(folder / method.drawn, page, PICTURES, text)
    for kind, name in TOKENIZERS.items():
        text = f"{name.upper()}: letters in unseen fonts, and below each its reconstruction"
        yield from picture(folder / tokenizer_run(kind) / RECONSTRUCTIONS, page, PICTURES, text)
