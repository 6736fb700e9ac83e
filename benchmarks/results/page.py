"""Tables and pictures of a study, from its run folders.

They are parts of a page between `<!-- NAME -->` and `<!-- end of NAME -->`, one for each data set.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results.driver import TIMES
from benchmarks.results.tasks import HELD_OUT, TEST, Method, Study
from megavis.config.errors import UserError
from megavis.data.format.files import from_json
from megavis.reports.run_record import RunRecord
from megavis.training.metrics import read_json_lines

_PICTURES = Path("images/results")
_NONE = ""
_COLORS = ("#1f5fa8", "#c2571a", "#3d8f4b", "#8a4fa8", "#b03060", "#6b6b2f", "#2f8f8f", "#444444")


def write_page(study: Study, folder: Path, page: Path | None) -> list[Path]:
    """Write `results.md` with the pictures that it shows, and parts of another page.

    Args:
        study: whose runs are read, as far as they have finished.
        folder: of the study.
        page: also gets the parts and the pictures; None for no other page.

    Returns:
        The pages written.

    Raises:
        UserError: `page` lacks the marks of a part.
    """
    written = []
    own = folder / "results.md"
    for path in filter(None, (own, page)):
        parts = {"cifar10": _cifar10(study, folder, path), "mnist": _mnist(study, folder)}
        marked = {name: f"{_mark(name)}\n{text}\n{_end(name)}" for name, text in parts.items()}
        if path == own:
            text = "\n\n".join(marked.values()) + "\n"
        else:
            text = path.read_text(encoding="utf-8")
            for name, part in marked.items():
                text = _replaced(text, name, part, path)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _mark(name: str) -> str:
    return f"<!-- {name} -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"


def _replaced(text: str, name: str, part: str, path: Path) -> str:
    pattern = f"{re.escape(_mark(name))}.*?{re.escape(_end(name))}"
    text, count = re.subn(pattern, lambda _: part, text, flags=re.DOTALL)
    if count != 1:
        raise UserError(f"{path}: must have '{_mark(name)}' and '{_end(name)}' once")
    return text


def _cifar10(study: Study, folder: Path, page: Path) -> str:
    methods = [method for method in study.methods if method.data == "cifar10"]
    rows = [row for method in methods if (row := _row(method, folder, study)) is not None]
    lines = [*_facts(folder, methods), ""]
    if rows:
        has_tests = any(row[-1] or row[-2] for row in rows)
        head = ["", "images seen", "CPU minutes", "untrained", "linear probe", "fine-tuned"]
        head += ["linear probe, test", "fine-tuned, test"] if has_tests else []
        pixels = _pixels(methods, folder)
        rows.append(["raw pixels", *[_NONE] * 3, pixels[0], _NONE, pixels[1], _NONE])
        lines += _table(head, [row[: len(head)] for row in rows])
        if not has_tests:
            lines += ["", "The classes of the test images have not been looked at yet."]
    lines += _missing(methods, [row[0] for row in rows])
    lines += _pictures(methods, folder, page)
    return "\n".join(lines)


def _row(method: Method, folder: Path, study: Study) -> list[str] | None:
    """Return the cells of a method; None if none of its runs has a result."""
    probe, test = (_probe_of(method, folder, name) for name in (HELD_OUT, TEST))
    tuned = _read(folder / method.finetuned / "evaluation/finetune_test.json")
    tested = _read(folder / method.finetuned / TEST)
    if probe is None and tuned is None:
        return None
    runs = [method.finetuned] + ([method.pretrained] if method.pretrain else [])
    kinds = ["pretraining"] if method.pretrain else ["both" if method.is_long else "finetuning"]
    if method.pretrain and tuned is not None:
        kinds.append("finetuning")
    text = " + ".join(f"{study.seen(kind):,}" for kind in kinds)
    return [
        method.name,
        text,
        " + ".join(
            f"{minutes:.0f}" for run in reversed(runs) if (minutes := _minutes(folder, run))
        ),
        _percent(probe and probe["untrained_accuracy"]),
        _best(probe),
        _percent(tuned and tuned["top1"]),
        _best(test),
        _percent(tested and tested["rows"][0]["top1"]),
    ]


def _probe_of(method: Method, folder: Path, name: Path) -> Any:
    return _read(folder / method.pretrained / name) if method.pretrain else None


def _best(probe: Any) -> str:
    if probe is None:
        return _NONE
    best = probe["best_layer"]
    return f"{_percent(best['accuracy'])} (layer {best['layer']})"


def _pixels(methods: Sequence[Method], folder: Path) -> tuple[str, str]:
    """Return the accuracies of raw pixels of 32², on held-out and on test images."""
    found = []
    for name in (HELD_OUT, TEST):
        probes = (_probe_of(method, folder, name) for method in methods)
        found.append(next((_percent(each["pixels"]["accuracy"]) for each in probes if each), _NONE))
    return found[0], found[1]


def _minutes(folder: Path, run: Path) -> float:
    """Return the processor minutes of a training, over all starts."""
    times = read_json_lines(folder / TIMES)
    return sum(each["processor_seconds"] for each in times if each["done"] == str(run)) / 60


def _facts(folder: Path, methods: Sequence[Method]) -> Iterator[str]:
    """Yield machine, versions, days and commits of the runs that there are."""
    folders = [run for method in methods for run in _runs(method)]
    started = [folder / run for run in folders if (folder / run / "metrics.jsonl").exists()]
    times = [each for each in read_json_lines(folder / TIMES) if Path(each["done"]) in folders]
    if not started or not times:
        yield "Nothing has been run."
        return
    start = RunRecord.read(started[0]).starts[-1]
    versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
    days = sorted({each["began"].split()[0] for each in times})
    commits = ", ".join(dict.fromkeys(each["commit"] for each in times if each["commit"]))
    yield f"{start['machine']}; {' to '.join(dict.fromkeys((days[0], days[-1])))}; {versions};"
    yield f"commit {commits or 'unknown'}."


def _runs(method: Method) -> Iterator[Path]:
    if method.pretrain:
        yield method.pretrained
    if method.finetune:
        yield method.finetuned


def _missing(methods: Sequence[Method], found: Sequence[str]) -> list[str]:
    names = [method.name for method in methods if method.name not in found]
    return ["", f"Not run yet: {'; '.join(names)}."] if names else []


def _pictures(methods: Sequence[Method], folder: Path, page: Path) -> Iterator[str]:
    """Yield the pictures' lines; copy them next to the page."""
    target = page.parent / _PICTURES
    if _draw_depth(methods, folder, target / "depth.png"):
        yield f"\n![Linear probe of held-out images, by layer]({_PICTURES}/depth.png)"
        yield "\nLinear probe of held-out images by layer; dashed: the same networks untrained."
    for method in methods:
        if not method.figure:
            continue
        drawn = folder / method.pretrained / f"evaluation/{method.figure}.png"
        if drawn.exists():
            name = f"{method.pretrained.name}_{method.figure}.png"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(drawn, target / name)
            yield f"\n![{method.name}: {method.figure}]({_PICTURES}/{name})"
            yield f"\n{method.name}: `megavis figure {method.figure}` on held-out images."


def _draw_depth(methods: Sequence[Method], folder: Path, path: Path) -> bool:
    """Draw accuracy over layers of all methods; return whether there is any."""
    import matplotlib.pyplot as plt

    probes = [(method, _probe_of(method, folder, HELD_OUT)) for method in methods]
    found = [(method, probe) for method, probe in probes if probe is not None]
    if not found:
        return False
    figure, axes = plt.subplots(figsize=(7, 4))
    for (method, probe), color in zip(found, _COLORS, strict=False):
        layers = [score["layer"] for score in probe["trained"]]
        trained = [100 * score["accuracy"] for score in probe["trained"]]
        untrained = [100 * score["accuracy"] for score in probe["untrained"][0]]
        axes.plot(layers, trained, color=color, marker="o", markersize=3, label=method.name)
        axes.plot(layers, untrained, color=color, linestyle="--", linewidth=0.8)
    axes.set(xlabel="layer", ylabel="accuracy, %")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return True


def _mnist(study: Study, folder: Path) -> str:
    methods = [method for method in study.methods if method.data == "mnist"]
    lines = [*_facts(folder, methods), ""]
    rows = [row for method in methods for row in _likelihoods(method, folder)]
    if rows:
        head = ["", "images seen", "CPU minutes", "bits per dimension", "of test images"]
        lines += _table(head, rows)
    lines += _missing(methods, [row[0] for row in rows])
    return "\n".join(lines)


def _likelihoods(method: Method, folder: Path) -> Iterator[list[str]]:
    """Yield the curve over training, and the likelihood of all test images."""
    run = folder / method.pretrained
    if not (run / "metrics.jsonl").exists():
        return
    record = RunRecord.read(run)
    batch, count = (
        record.setting("training.batch_size"),
        record.setting("training.validation_images"),
    )
    per_loss = record.dimensions_per_loss
    assert per_loss is not None, "the loss of iGPT is a likelihood of images"
    for step, loss in zip(*record.series("validation_loss"), strict=True):
        bits = loss / per_loss / math.log(2)
        yield [method.name, f"{step * batch:,}", _NONE, f"{bits:.3f}", f"{count:,}"]
    final = _read(run / "evaluation/likelihood.json")
    if final is not None:
        minutes = f"{_minutes(folder, method.pretrained):.0f}"
        bits, images = final["bits_per_dimension"], final["num_images"]
        seen = f"{record.last_step * batch:,}"
        yield [method.name, seen, minutes, f"**{bits:.3f}**", f"{images:,}"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f} %"


def _read(path: Path) -> Any:
    return from_json(path.read_text(encoding="utf-8")) if path.exists() else None
