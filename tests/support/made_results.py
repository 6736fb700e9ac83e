"""Results of evaluations with chosen numbers, for run folders that a test writes by hand."""

import dataclasses
import json
from pathlib import Path

from megavis.evaluation.results import FORMS, LayerScore

DATA = Path(__file__).parents[1] / "data" / "results"


def made(name, **changes):
    """Return the result in tests/data/results with other values of some fields."""
    return dataclasses.replace(FORMS[name].read(DATA / name), **changes)


def score(layer, accuracy):
    """Return the score of a layer; a higher accuracy is higher on held-out images too."""
    return LayerScore(layer, 1e-3, accuracy, 1.0 - accuracy, accuracy, None)


def made_probe(best, untrained, pixels, *, layer=1, **changes):
    """Return a probe of layers 0 to `layer`, the last one best, and one untrained network."""
    networks = [
        (*(score(each, 0.1) for each in range(layer)), score(layer, accuracy))
        for accuracy in (best, untrained)
    ]
    changes = {"num_views": 1, "concatenated": (), "low_data": (), **changes}
    return made(
        "probe.json",
        best_layer=networks[0][-1],
        untrained_accuracy=untrained,
        trained=networks[0],
        untrained=(networks[1],),
        pixels=score(0, pixels),
        **changes,
    )


def made_samples(distance, num_images):
    """Return a comparison of images with real ones by a network that is not Inception."""
    result = made("samples.json", fid=None, sfid=None, inception_score=None)
    images = dataclasses.replace(result.samples, num_images=num_images)
    changes = {"samples": images, "reference": images, "precision": 0.5, "recall": 0.25}
    return dataclasses.replace(result, frechet_distance=distance, **changes)


def made_reconstruction(psnr, ssim, distance):
    """Return a comparison of images with what a tokenizer makes of them."""
    result = made("reconstruction.json", psnr=psnr, ssim=ssim)
    return dataclasses.replace(result, distance=made_samples(distance, result.images))


def made_classes(top1, num_images=40):
    """Return the result of fine-tuning on test images."""
    found = made("finetune_test.json")
    accuracy = dataclasses.replace(found.accuracy, top1=top1, num_images=num_images)
    return dataclasses.replace(found, accuracy=accuracy)


def write_results(folder, **results):
    """Write results to `evaluation/` of a run folder, each under its name without `.json`."""
    for name, result in results.items():
        result.write(folder / "evaluation" / f"{name}.json")


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_run(folder, name, *, step=4, **evaluation):
    """Write a run that has trained to a step, with the files of its evaluation."""
    run = folder / "runs" / name
    start = {"machine": "Linux, 2 CPUs", "versions": {"torch": "2"}, "likelihood": {"per_loss": 2}}
    _write(run / "starts.jsonl", start)
    _write(run / "metrics.jsonl", {"step": step, "validation_loss": 2.0})
    (run / "config.yaml").write_text("training: {batch_size: 16, validation_images: 500}\n")
    write_results(run, **evaluation)
    line = {"done": f"runs/{name}", "processor_seconds": 90, "began": "2026-11-26 07:00"}
    with (folder / "times.jsonl").open("a") as times:
        times.write(json.dumps({**line, "commit": "abc"}) + "\n")


def rows_of(text):
    """Return the cells of a table's rows, by the first one."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
