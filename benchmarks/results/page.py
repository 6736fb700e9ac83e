"""Tables and pictures of a study, from its run folders.

They are parts of a page between `<!-- NAME -->` and `<!-- end of NAME -->`, one for each data set.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.results.driver import TIMES
from benchmarks.results.tasks import HELD_OUT, TEST, DataSet, Method, Study
from megavis.config.errors import UserError
from megavis.evaluation.images.results import ReconstructionResult, SamplesResult
from megavis.evaluation.result_files import Result
from megavis.evaluation.results import (
    ClassAccuracy,
    EnsembleResult,
    FinetuneResult,
    LikelihoodResult,
    ProbeResult,
)
from megavis.reports.run_record import RunRecord
from megavis.training.metrics import read_json_lines

_Kind = TypeVar("_Kind", bound=Result)
_TUNED, _LIKELIHOOD = (
    Path("evaluation") / name for name in ("finetune_test.json", "likelihood.json")
)
_PICTURES = Path("images/results")
_SMALL = ("A small study: every command ran, and no number means anything.",)
_HEAD = (
    "",
    "images seen",
    "CPU minutes",
    "untrained",
    "linear probe",
    "fine-tuned",
    "linear probe, test",
    "fine-tuned, test",
)
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
        parts = {
            "cifar10": [*_classes(study, "cifar10", folder), *_pictures(study, folder, path)],
            "mnist": [*_likelihoods(study, folder)],
            "digits": [*_classes(study, "digits", folder)],
            "generated": [*_generated(study, folder, path)],
        }
        marked = {
            name: "\n".join([_mark(name), *lines, _end(name)]) for name, lines in parts.items()
        }
        if path == own:
            text = "\n\n".join([*_SMALL * study.small, *marked.values()]) + "\n"
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


def _classes(study: Study, data: DataSet, folder: Path) -> Iterator[str]:
    """Yield a table of accuracies, a row for each method with a result."""
    methods = [each for each in study.methods if each.data == data and not each.tokenizer]
    names = dict.fromkeys(method.name for method in methods)
    rows = {
        name: _row([each for each in methods if each.name == name], folder, study) for name in names
    }
    found = [row for row in rows.values() if row is not None]
    if found:
        yield from _facts(folder, methods)
        pixels = _pixels(methods, folder)
        if any(pixels):
            found.append(["raw pixels", "", "", "", pixels[0], "", pixels[1], ""])
        yield from _table(_filled([list(_HEAD), *found]))
        if not any(row[-1] or row[-2] for row in found):
            yield "\nThe classes of the test images have not been looked at yet.\n"
    yield from _missing(name for name, row in rows.items() if row is None)


def _filled(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows without the columns of which only the head is filled."""
    keep = [
        number
        for number in range(len(rows[0]))
        if number < 1 or any(row[number] for row in rows[1:])
    ]
    return [[row[number] for number in keep] for row in rows]


def _row(methods: Sequence[Method], folder: Path, study: Study) -> list[str] | None:
    """Return the cells of a method, over the seeds that have a result; None without any."""
    probes, tests = list[ProbeResult](), list[ProbeResult]()
    tuned, tested, minutes = list[FinetuneResult](), list[EnsembleResult](), []
    for method in methods:
        probes += _found(ProbeResult, folder, method, HELD_OUT)
        tests += _found(ProbeResult, folder, method, TEST)
        tuned += _found(FinetuneResult, folder, method, _TUNED)
        tested += _found(EnsembleResult, folder, method, TEST)
        minutes.append([_minutes(folder, run) for run in method.runs])
    if not probes and not tuned:
        return None
    seen = study.seen(methods[0])[: None if tuned else 1]
    times = [statistics.fmean(each) for each in zip(*minutes, strict=True)][: len(seen)]
    return [
        methods[0].name,
        " + ".join(f"{number:,}" for number in seen),
        " + ".join(f"{number:.0f}" for number in times),
        _percent([probe.untrained_accuracy for probe in probes], len(methods)),
        _best(probes, len(methods)),
        _percent([_top1(result) for result in tuned], len(methods)),
        _best(tests, len(methods)),
        _percent([result.rows[0].top1 for result in tested], len(methods)),
    ]


def _top1(result: FinetuneResult) -> float:
    """Return the accuracy of images' classes, which all runs of the study predict."""
    assert isinstance(result.accuracy, ClassAccuracy)
    return result.accuracy.top1


def _found(form: type[_Kind], folder: Path, method: Method, name: Path) -> list[_Kind]:
    """Return the result in the run of a method's config, if both are there.

    Raises:
        UserError: the file has another form.
    """
    is_tuned = form in (FinetuneResult, EnsembleResult)
    if not (method.finetune if is_tuned else method.pretrain):
        return []
    path = folder / (method.finetuned if is_tuned else method.pretrained) / name
    return [form.read(path)] if path.exists() else []


def _best(probes: Sequence[ProbeResult], seeds: int) -> str:
    if not probes:
        return ""
    layers = ", ".join(str(probe.best_layer.layer) for probe in probes)
    return f"{_percent([probe.best_layer.accuracy for probe in probes], seeds)} (layer {layers})"


def _pixels(methods: Sequence[Method], folder: Path) -> list[str]:
    """Return the accuracies of raw pixels of 32², on held-out and on test images."""
    patches = [method for method in methods if method.reads == "cifar10"]
    return [
        _percent(
            [
                probe.pixels.accuracy
                for method in patches
                for probe in _found(ProbeResult, folder, method, name)
            ][:1]
        )
        for name in (HELD_OUT, TEST)
    ]


def _minutes(folder: Path, run: Path) -> float:
    """Return the processor minutes of a training, over all starts."""
    times = read_json_lines(folder / TIMES)
    return sum(each["processor_seconds"] for each in times if each["done"] == str(run)) / 60


def _generated(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield distances of generated and of held-out images from training images, and pictures."""
    for method in (method for method in study.methods if method.tokenizer):
        if not (folder / method.last_result).exists():
            yield from _missing([method.name])
            continue
        vae, run = method.runs
        held_out = SamplesResult.read(folder / vae / "evaluation/held_out.json")
        samples = SamplesResult.read(folder / method.last_result)
        decoded = ReconstructionResult.read(folder / vae / "evaluation/reconstruction.json")
        yield from _facts(folder, [method])
        assert samples.reference.num_images is not None
        title = f"{samples.title} to {samples.reference.num_images:,} training images"
        head = ["", "images seen", "CPU minutes", "images", title, "precision", "recall"]
        seen = " + ".join(f"{number:,}" for number in study.seen(method))
        minutes = " + ".join(f"{_minutes(folder, each):.0f}" for each in method.runs)
        yield from _table(
            [
                head,
                ["held-out images", "", "", *_distances(held_out)],
                [f"{method.name}, VAE + model", seen, minutes, *_distances(samples)],
            ]
        )
        assert decoded.distance is not None
        yield (
            f"\nHeld-out images decoded by the VAE: {decoded.psnr:.1f} dB, SSIM {decoded.ssim:.2f};"
            f" distance to their originals {decoded.distance.frechet_distance:.1f}."
        )
        for picture, text in (
            (vae / "evaluation/reconstructions.png", "held-out images, and decoded by the VAE"),
            (run / "evaluation/classes.png", "generated, a row for each class"),
        ):
            yield from _picture(folder / picture, page, f"{method.name}: {text}")


def _distances(result: SamplesResult) -> list[str]:
    """Return the cells of a comparison with training images, by a network that is not Inception."""
    numbers = (result.frechet_distance, result.precision, result.recall)
    distance, precision, recall = (0.0 if number is None else number for number in numbers)
    return [
        f"{result.samples.num_images:,}",
        f"{distance:.1f}",
        f"{precision:.2f}",
        f"{recall:.2f}",
    ]


def _picture(drawn: Path, page: Path, text: str) -> Iterator[str]:
    """Yield a picture's lines; copy it next to the page."""
    target = page.parent / _PICTURES
    target.mkdir(parents=True, exist_ok=True)
    name = f"{drawn.parents[1].name}_{drawn.name}"
    shutil.copyfile(drawn, target / name)
    yield f"\n![{text}]({_PICTURES}/{name})"
    yield f"\n{text}."


def _facts(folder: Path, methods: Sequence[Method]) -> Iterator[str]:
    """Yield machine, versions, days and commits of the runs that have a result."""
    folders = [run for method in methods for run in method.runs]
    started = [folder / run for run in folders if (folder / run / "metrics.jsonl").exists()]
    times = [each for each in read_json_lines(folder / TIMES) if Path(each["done"]) in folders]
    start = RunRecord.read(started[0]).starts[-1]
    versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
    days = sorted({each["began"].split()[0] for each in times})
    commits = ", ".join(dict.fromkeys(each["commit"] for each in times if each["commit"]))
    yield f"{start['machine']}; {' to '.join(dict.fromkeys((days[0], days[-1])))}; {versions};"
    yield f"commit {commits or 'unknown'}.\n"


def _missing(names: Iterable[str]) -> Iterator[str]:
    if found := "; ".join(names):
        yield f"Not finished yet: {found}."


def _pictures(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield the pictures' lines; copy them next to the page."""
    methods = [method for method in study.methods if method.data == "cifar10"]
    target = page.parent / _PICTURES
    if _draw_depth(methods, folder, target / "depth.png"):
        yield f"\n![Linear probe of held-out images, by layer]({_PICTURES}/depth.png)"
        yield "\nLinear probe of held-out images by layer; dashed: the same networks untrained."
    for method in methods:
        drawn = (
            folder / method.pretrained / f"evaluation/{method.figure}.png"
            if method.figure
            else None
        )
        if drawn is not None and drawn.exists():
            yield from _picture(
                drawn, page, f"{method.name}: `megavis figure {method.figure}` on held-out images"
            )


def _draw_depth(methods: Sequence[Method], folder: Path, path: Path) -> bool:
    """Draw accuracy over layers of all methods; return whether there is any."""
    from matplotlib.figure import Figure

    found = [
        (method, probe)
        for method in methods
        for probe in _found(ProbeResult, folder, method, HELD_OUT)
    ]
    if not found:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (method, probe), color in zip(found, _COLORS, strict=False):
        layers = [score.layer for score in probe.trained]
        trained = [100 * score.accuracy for score in probe.trained]
        untrained = [100 * score.accuracy for score in probe.untrained[0]]
        axes.plot(layers, trained, color=color, marker="o", markersize=3, label=method.name)
        axes.plot(layers, untrained, color=color, linestyle="--", linewidth=0.8)
    axes.set(xlabel="layer", ylabel="accuracy, %")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    return True


def _likelihoods(study: Study, folder: Path) -> Iterator[str]:
    """Yield a table of bits per dimension: the curve over training, and all test images."""
    methods = [method for method in study.methods if method.data == "mnist"]
    rows = {method.name: list(_curve(method, folder)) for method in methods}
    if any(rows.values()):
        yield from _facts(folder, methods)
        head = ["", "images seen", "CPU minutes", "bits per dimension", "of test images"]
        yield from _table([head, *(row for each in rows.values() for row in each)])
        yield ""
    yield from _missing(name for name, each in rows.items() if not each)


def _curve(method: Method, folder: Path) -> Iterator[list[str]]:
    run = folder / method.pretrained
    if not (run / "metrics.jsonl").exists():
        return
    record = RunRecord.read(run)
    batch = record.setting("training.batch_size")
    count = record.setting("training.validation_images")
    per_loss = record.dimensions_per_loss
    assert per_loss is not None, "the loss of iGPT is a likelihood of images"
    for step, loss in zip(*record.series("validation_loss"), strict=True):
        bits = loss / per_loss / math.log(2)
        yield [method.name, f"{step * batch:,}", "", f"{bits:.3f}", f"{count:,}"]
    for final in _found(LikelihoodResult, folder, method, _LIKELIHOOD):
        minutes = f"{_minutes(folder, method.pretrained):.0f}"
        bits, seen = final.bits_per_dimension, f"{record.last_step * batch:,}"
        yield [method.name, seen, minutes, f"**{bits:.3f}**", f"{final.num_images:,}"]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *others = rows
    for line in (head, ["---"] * len(head), *others):
        yield f"| {' | '.join(line)} |"


def _percent(shares: Sequence[float], seeds: int = 1) -> str:
    """Return the mean, with the sample standard deviation of several; empty for none."""
    if not shares:
        return ""
    text = f"{100 * statistics.fmean(shares):.1f}"
    if len(shares) > 1:
        text += f" ± {100 * statistics.stdev(shares):.1f}"
    return f"{text} %" + ("" if len(shares) == seeds else f", {len(shares)} of {seeds} seeds")
