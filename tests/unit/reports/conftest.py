"""Handwritten run folders with everything that a report can show."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from made_results import DATA, made, made_classes, write_results

from megavis.evaluation.figures import write_table
from megavis.evaluation.images.results import NetworkName
from megavis.evaluation.results import TransferRow

CONFIG = """\
name: {name}
seed: 3
objective: {{name: igpt}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4}}
data: {{train: demo/train, validation: demo/validation, image_size: 8}}
training: {{steps: 40, batch_size: 8, precision: float32, validation_images: 64, spike_threshold: 8,
  check_replicas_every: 5}}
"""


def results():
    """Return a result of each kind that is compared with papers."""
    probe = made("probe.json", num_views=1)
    few = dataclasses.replace(probe.low_data[0], deviation=0.07)
    drawn = made("samples.json")
    yield "probe", dataclasses.replace(probe, low_data=(few,))
    yield "finetune_test", made_classes(0.904, num_images=30)
    yield "likelihood", made("likelihood.json")
    others = dict.fromkeys(("sfid", "inception_score", "inception_score_std", "recall"))
    yield (
        "samples",
        dataclasses.replace(
            drawn,
            **others,
            network=NetworkName("Inception", "0123456789", "bilinear", is_published=True),
            reference=dataclasses.replace(drawn.reference, num_images=50_000),
            caution="compare only with the same N",
        ),
    )


def write_json(path, content):
    path.write_text(json.dumps(content))


def write_png(path):
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (24, 60, 3), np.uint8)
    Image.fromarray(noise).save(path)


def write_run(folder, name):
    """Write a run folder with one file of each kind."""
    for part in ("samples", "evaluation"):
        (folder / part).mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(name=name))
    records = [{"step": 0, "validation_loss": math.log(512)}]
    for step in range(10, 41, 10):
        speed = {"samples_per_s": 16.0, "tokens_per_s": 1024.0, "samples_seen": 8 * step}
        records.append({"step": step, "loss": 6 - step / 10, "lr": 1e-3, "grad_norm": 1.0, **speed})
    records[2] |= {"grad_norm": math.inf, "steps_skipped": 2}
    records[3] |= {"checkpoints_not_saved": 1, "loss_spikes": 1}
    event = {"times_gone_back": 1, "batches_skipped": 12}
    records.insert(3, {"step": 20, "first_bad_step": 22, "rolled_back_from": 25, **event})
    records[4] |= {"validation_loss": 3 * math.log(2), "validation_accuracy": 0.5}
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + '{"step": 50, "lo')
    start = {"time": "2026-01-01T00:00:00+00:00", "command": "megavis train small.yaml seed=3"}
    facts = {"processes": 2, "device": "cpu", "versions": {"torch": "2.11.0"}}
    starts = [{**start, "first_step": step, **facts} for step in (0, 20)]
    (folder / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    fault = {"time": "2026-01-01T03:05:06+00:00", "step": 24, "exit_code": 71}
    what = "blocks.1.mlp.weight differs between rank 0 on left, rank 1 on right"
    (folder / "faults.jsonl").write_text(json.dumps({**fault, "what": what}) + "\n")
    evaluation = folder / "evaluation"
    write_results(folder, **dict(results()))
    (evaluation / "watch.log").write_text("step 20")
    (evaluation / "transfer.md").write_text(
        "Linear probes\n\n|set|top-1, %|\n|---|---|\n|cifar10|62.5|\n"
    )
    (row, *_) = TransferRow.read(DATA / "transfer.csv")
    best = dataclasses.replace(row.score, layer=1, accuracy=0.625)
    data = {"data_set": "cifar10", "num_test": 80, "test": "test_batch.bin"}
    row = dataclasses.replace(row, score=best, **data)
    write_table(evaluation / "transfer.csv", [row.record()])
    write_json(evaluation / "new_thing.json", {"num_images": 12345, "scores": [{"a": 0.12345}]})
    shutil.copy(DATA / "groups.csv", evaluation)
    write_png(evaluation / "groups.png")
    write_png(folder / "samples" / "samples-00000040.png")
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("reported") / "first", "first")


@pytest.fixture(scope="session")
def two_run_folders(run_folder):
    return run_folder, write_run(run_folder.parent / "second", "<b>second</b>")


@pytest.fixture(scope="session")
def page_of_two(two_run_folders):
    from megavis.reports.page import render
    from megavis.reports.run_record import RunRecord

    return render([RunRecord.read(folder) for folder in two_run_folders])
