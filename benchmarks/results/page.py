"""Tables and pictures of a study, from its run folders: a part of the page for each data set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

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
from benchmarks.results.tasks import HELD_OUT, TEST, DataSet, Method, Study
from megavis.evaluation.images.results import ReconstructionResult, SamplesResult
from megavis.evaluation.results import (
    EnsembleResult,
    FinetuneResult,
    LikelihoodResult,
    ProbeResult,
)
from megavis.reports.run_record import RunRecord

_TUNED, _LIKELIHOOD = (
    Path("evaluation") / name for name in ("finetune_test.json", "likelihood.json")
)
_PICTURES = Path("images/results")
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
            "cifar10": [*_classes(study, "cifar10", folder), *_pictures(study, folder, path)],
            "mnist": [*_likelihoods(study, folder, path)],
            "digits": [*_classes(study, "digits", folder)],
            "generated": [*_generated(study, folder, path)],
        }

    return write_parts(folder / "results.md", page, parts_for, small=study.small)


def _classes(study: Study, data: DataSet, folder: Path) -> Iterator[str]:
    """Yield a table of accuracies, a row for each method with a result."""
    methods = [each for each in study.methods if each.data == data and not each.tokenizer]
    names = dict.fromkeys(method.name for method in methods)
    rows = {
        name: _row([each for each in methods if each.name == name], folder, study) for name in names
    }
    found = [row for row in rows.values() if row is not None]
    if found:
        yield from facts(folder, _runs(methods))
        pixels = _pixels(methods, folder)
        if any(pixels):
            found.append(["raw pixels", "", "", "", pixels[0], "", pixels[1], ""])
        yield from table(filled([list(_HEAD), *found]))
        yield ""
        if not any(row[-1] or row[-2] for row in found):
            yield "The classes of the test images have not been looked at yet.\n"
    yield from missing(name for name, row in rows.items() if row is None)


def _runs(methods: Sequence[Method]) -> list[Path]:
    return [run for method in methods for run in method.runs]


def _row(methods: Sequence[Method], folder: Path, study: Study) -> list[str] | None:
    """Return the cells of a method, over the seeds that have a result; None without any."""
    probes = found(ProbeResult, folder, methods, HELD_OUT)
    tests = found(ProbeResult, folder, methods, TEST)
    tuned = found(FinetuneResult, folder, methods, _TUNED)
    tested = found(EnsembleResult, folder, methods, TEST)
    minutes = [[processor_minutes(folder, run) for run in method.runs] for method in methods]
    if not probes and not tuned:
        return None
    seen = study.seen(methods[0])[: None if tuned else 1]
    times = [statistics.fmean(each) for each in zip(*minutes, strict=True)][: len(seen)]
    return [
        methods[0].name,
        " + ".join(f"{number:,}" for number in seen),
        " + ".join(f"{number:.0f}" for number in times),
        percent([probe.untrained_accuracy for probe in probes], len(methods)),
        best_layers(probes, len(methods)),
        percent([top1(result) for result in tuned], len(methods)),
        best_layers(tests, len(methods)),
        percent([result.rows[0].top1 for result in tested], len(methods)),
    ]


def _pixels(methods: Sequence[Method], folder: Path) -> list[str]:
    """Return the accuracies of raw pixels of 32², on held-out and on test images."""
    patches = [method for method in methods if method.reads == "cifar10"]
    return [
        percent([probe.pixels.accuracy for probe in found(ProbeResult, folder, patches, name)][:1])
        for name in (HELD_OUT, TEST)
    ]


def _generated(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield distances of generated and of held-out images from training images, and pictures."""
    for method in (method for method in study.methods if method.tokenizer):
        if not (folder / method.last_result).exists():
            yield from missing([method.name])
            continue
        vae, run = method.runs
        held_out = SamplesResult.read(folder / vae / "evaluation/held_out.json")
        samples = SamplesResult.read(folder / method.last_result)
        decoded = ReconstructionResult.read(folder / vae / "evaluation/reconstruction.json")
        yield from facts(folder, method.runs)
        assert samples.reference.num_images is not None
        title = f"{samples.title} to {samples.reference.num_images:,} training images"
        head = ["", "images seen", "CPU minutes", "images", title, "precision", "recall"]
        seen = " + ".join(f"{number:,}" for number in study.seen(method))
        minutes = " + ".join(f"{processor_minutes(folder, each):.0f}" for each in method.runs)
        yield from table(
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
        for drawn, text in (
            (vae / "evaluation/reconstructions.png", "held-out images, and decoded by the VAE"),
            (run / "evaluation/classes.png", "generated, a row for each class"),
        ):
            yield from picture(folder / drawn, page, _PICTURES, f"{method.name}: {text}")


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


def _pictures(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield the pictures' lines; copy them next to the page."""
    methods = [method for method in study.methods if method.data == "cifar10"]
    target = page.parent / _PICTURES
    if _draw_depth(methods, folder, target / "depth.png"):
        yield f"\n![Linear probe of held-out images, by layer]({_PICTURES}/depth.png)"
        yield "\nLinear probe of held-out images by layer; dashed: the same networks untrained."
    for method in (method for method in methods if method.figure):
        drawn = folder / method.pretrained / f"evaluation/{method.figure}.png"
        text = f"{method.name}: `megavis figure {method.figure}` on held-out images"
        yield from picture(drawn, page, _PICTURES, text)


def _draw_depth(methods: Sequence[Method], folder: Path, path: Path) -> bool:
    """Plot accuracy over layers of all methods; return whether there is any."""
    from matplotlib.figure import Figure

    probes = [
        (method, probe)
        for method in methods
        for probe in found(ProbeResult, folder, [method], HELD_OUT)
    ]
    if not probes:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (method, probe), color in zip(probes, _COLORS, strict=False):
        layers = [score.layer for score in probe.trained]
        trained = [100 * score.accuracy for score in probe.trained]
        untrained = [100 * score.accuracy for score in probe.untrained[0]]
        axes.plot(layers, trained, color=color, marker="o", markersize=3, label=method.name)
        axes.plot(layers, untrained, color=color, linestyle="--", linewidth=0.8)
    axes.set(xlabel="layer", ylabel="accuracy, %")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
    return True


def _likelihoods(study: Study, folder: Path, page: Path) -> Iterator[str]:
    """Yield bits per dimension, of the curve over training and of all test images, and pictures."""
    methods = [method for method in study.methods if method.data == "mnist"]
    rows = {method.name: list(_curve(method, folder)) for method in methods}
    if any(rows.values()):
        yield from facts(folder, _runs(methods))
        head = ["", "images seen", "CPU minutes", "bits per dimension", "of test images"]
        yield from table([head, *(row for each in rows.values() for row in each)])
        yield ""
    yield from missing(name for name, each in rows.items() if not each)
    for method in methods:
        for name, text in (
            ("generated", "generated"),
            ("completions", "test images, their upper halves, and four completions of each"),
        ):
            drawn = folder / method.pretrained / f"evaluation/{name}.png"
            yield from picture(drawn, page, _PICTURES, f"{method.name}: {text}")


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
    for final in found(LikelihoodResult, folder, [method], _LIKELIHOOD):
        minutes = f"{processor_minutes(folder, method.pretrained):.0f}"
        bits, seen = final.bits_per_dimension, f"{record.last_step * batch:,}"
        yield [method.name, seen, minutes, f"**{bits:.3f}**", f"{final.num_images:,}"]
