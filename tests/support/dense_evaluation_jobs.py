"""Evaluation of segmentation and detection in worker processes."""

from unittest.mock import patch

import numpy as np

from megavis.config.schema import RunConfig
from megavis.data.codecs.instances import read_objects
from megavis.evaluation import detection
from megavis.evaluation.detection import Found
from megavis.evaluation.results import DetectionAccuracy, PixelAccuracy
from megavis.evaluation.segmentation import evaluate_segmentation
from megavis.model.inference import Inference
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.job import open_job
from megavis.training.trainer import Trainer

MISSED = 56
"""Height of images in which `detected_in` finds nothing."""


def segmented_in(launch: Launch, config: RunConfig) -> PixelAccuracy:
    """Evaluate untrained weights on the validation images."""
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        inference = Inference(Engine(run.objective).layers, context)
        images = run.task.validation.dataset
        return evaluate_segmentation(inference, run.objective, images, batch_size=1)


def detected_in(launch: Launch, config: RunConfig) -> tuple[int, DetectionAccuracy]:
    """Evaluate a detector that finds the true objects, but none in images of one height.

    Returns:
        How many images this process looked at, and the numbers of all.
    """
    with open_job(config, launch, device="cpu") as context:
        run = Trainer.open(config, context)
        inference = Inference(Engine(run.objective).layers, context)
        images = run.task.validation.dataset
        payloads = [detection._payload(images, place) for place in range(len(images))]
        truth = {
            detection.decode_rgb(image).tobytes(): read_objects(target)
            for image, target in payloads
        }
        seen = []

        def find(_, __, shown: list[np.ndarray]) -> list[Found]:
            seen.extend(shown)
            return [_found(truth[image.tobytes()], len(image)) for image in shown]

        with patch.object(detection, "detect", find):
            accuracy = detection.evaluate_detection(inference, run.objective, images, batch_size=1)
        return len(seen), accuracy


def _found(annotation: dict, height: int) -> Found:
    objects = [] if height == MISSED else [o for o in annotation["objects"] if not o["crowd"]]
    return Found(
        np.array([each["box"] for each in objects]).reshape(-1, 4),
        np.linspace(0.9, 0.8, len(objects)),
        np.array([each["class"] for each in objects], np.int64),
        tuple(each["mask"] for each in objects),
    )
