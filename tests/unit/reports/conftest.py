"""Handwritten run folders with everything that a report can show."""

import json
import math

import numpy as np
import pytest

CONFIG = """\
name: {name}
seed: 3
objective: {{name: igpt}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4}}
data: {{train: demo/train, validation: demo/validation, image_size: 8}}
training: {{steps: 40, batch_size: 8, precision: float32, validation_images: 64, spike_threshold: 8,
  check_replicas_every: 5}}
"""


def score(layer, accuracy):
    return {"layer": layer, "penalty": 1e-3, "accuracy": accuracy, "vote_accuracy": None}


PROBE = {
    "best_layer": score(1, 0.757),
    "untrained_accuracy": 0.5,
    "step": 40,
    "trained": [score(0, 0.6), score(1, 0.757)],
    "untrained": [[score(0, 0.5), score(1, 0.4)], [score(0, 0.5), score(1, 0.3)]],
    "pixels": score(0, 0.25),
    "num_fitted": 200,
    "num_held_out": 50,
    "num_validation": 100,
    "num_classes": 3,
    "num_views": 1,
    "seed": 0,
    "low_data": [
        {
            "features": "trained",
            "images_per_class": 4,
            "accuracies": [0.5, 0.6],
            "mean": 0.55,
            "deviation": 0.07,
        }
    ],
}
CLASSES = {
    "step": 20,
    "part": "test",
    "data": "demo/validation",
    "num_images": 30,
    "top1": 0.904,
    "top5": 1.0,
    "num_views": 1,
    "vote": 0.904,
    "class_names": ["astronaut", "brick", "coffee"],
    "confusion": [[9, 1, 0], [0, 10, 0], [2, 0, 8]],
}
GENERATED = {
    "title": "FID",
    "fid": 12.3456,
    "precision": 0.5,
    "network": {"name": "Inception", "sha256": "0123456789", "resize": "bilinear"},
    "samples": {"source": "a.npz", "sha256": "ab", "num_images": 64},
    "reference": {"source": "b.npz", "sha256": "fedcba9876", "num_images": 50000},
    "caution": "compare only with the same N",
}


LIKELIHOOD = {
    "step": 40,
    "data": "demo/validation",
    "num_images": 64,
    "dimension": "a token",
    "dimensions_per_image": 256,
    "given": None,
    "nats_per_dimension": 2.0895,
    "bits_per_dimension": 3.0145,
    "nats_per_image": 534.912,
    "precision": "float32",
}


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
    write_json(evaluation / "probe.json", PROBE)
    write_json(evaluation / "finetune_test.json", CLASSES)
    write_json(evaluation / "samples.json", GENERATED)
    write_json(evaluation / "likelihood.json", LIKELIHOOD)
    (evaluation / "watch.log").write_text("step 20")
    (evaluation / "transfer.md").write_text(
        "Linear probes\n\n|set|top-1, %|\n|---|---|\n|cifar10|62.5|\n"
    )
    (evaluation / "transfer.csv").write_text(
        "data_set,labels,layer,accuracy,num_test,test\ncifar10,all,1,0.625,80,test_batch.bin\n"
    )
    write_json(evaluation / "new_thing.json", {"num_images": 12345, "scores": [{"a": 0.12345}]})
    (evaluation / "groups.csv").write_text("groups,psnr\n1,17.412345\n")
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
