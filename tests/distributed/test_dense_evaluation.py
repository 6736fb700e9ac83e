"""Two processes evaluate segmentation and detection as one does, each on its share."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_folder import write_coco_shards
from dense_evaluation_jobs import detected_in, segmented_in
from layout_curves import make_config
from scene_shards import write_scene_shards
from tiny import VIT, tiny

pytestmark = pytest.mark.once

NUM_CLASSES = {"segments": 5, "instances": 3}


def config_of(folder: Path, shards: Path, task: str) -> Any:
    path = folder / f"{task}.yaml"
    path.write_text(
        tiny(
            "{name: darl, patch_size: 8}",
            shards=shards,
            validates=True,
            model=VIT,
            data={"image_size": 32, "crop": "jittered"},
            training={"batch_size": 2, "validate_every": 1},
            finetune={
                "task": task, "num_classes": NUM_CLASSES[task], "head_width": 8,
                "visibility": "full",
            },
        )
    )  # fmt: skip
    return make_config(path, f"output={folder}")


def test_segmentation_counts_every_pixel_once(run_job: Any, tmp_path: Path) -> None:
    shards = write_scene_shards(tmp_path / "scenes", size=32) / "panoptic"
    config = config_of(tmp_path, shards, "segments")
    (alone,) = run_job(segmented_in, 1, config)
    assert alone.num_images == 6
    assert np.sum(alone.confusion) == 6 * 32**2
    assert np.count_nonzero(np.sum(alone.confusion, 0)) > 1, "more than one class is predicted"
    assert run_job(segmented_in, 2, config) == [alone, alone]


def test_detection_counts_every_image_once(run_job: Any, tmp_path: Path) -> None:
    """Of five images the second process has two, and repeats one that must not count."""
    shards = write_coco_shards(tmp_path / "coco", train=4, validation=5)
    config = config_of(tmp_path, shards, "instances")
    ((seen, alone),) = run_job(detected_in, 1, config)
    assert (seen, alone.num_images) == (5, 5)
    assert 0.2 < alone.box.ap < 0.95
    assert 0.2 < alone.mask.ap < 0.95
    assert run_job(detected_in, 2, config) == [(3, alone), (3, alone)]
