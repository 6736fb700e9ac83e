"""A step of detection in several layouts: draws of a sample do not depend on its process.

One step alone: in later ones rounding exchanges proposals that score nearly the same.
"""

from typing import Any

import pytest
from coco_folder import write_coco_shards
from detection_jobs import trained_in
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from tiny import VIT, tiny

from megavis.training.parity import train_briefly

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def config(tmp_path_factory: Any) -> Any:
    folder = write_coco_shards(tmp_path_factory.mktemp("instances"), train=4, validation=5)
    path = folder / "instances.yaml"
    path.write_text(
        tiny(
            "{name: darl, patch_size: 8}",
            shards=folder,
            validates=True,
            model=VIT,
            data={"image_size": 64, "crop": "jittered", "flip": True},
            training={"batch_size": 4, "micro_batch_size": 1, "validate_every": 1},
            finetune={
                "task": "instances", "num_classes": 3, "head_width": 8, "visibility": "full",
                "detector": "cascade", "window": 4, "global_blocks": [2],
                "relative_positions": True, "drop_path": 0.2,
            },
        )
    )  # fmt: skip
    return make_config(path, f"output={folder}")


def changed(config: Any, section: str, **keys: Any) -> Any:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=keys)})


def test_layouts_match_one_process(run_job: Any, config: Any) -> None:
    (reference,) = run_job(train_briefly, 1, config, 1)
    for stage in (2, 3):
        curves = run_job(train_briefly, 2, with_layout(config, zero_stage=stage), 1)
        assert largest_difference(curves, reference) <= TOLERANCE, stage
    other = config.model_copy(update={"seed": 1})
    (changed_seed,) = run_job(train_briefly, 1, other, 1)
    assert largest_difference([changed_seed], reference) > 100 * TOLERANCE


def test_partitioned_bf16_keeps_losses_float32(run_job: Any, config: Any) -> None:
    (exact,) = run_job(train_briefly, 1, config, 1)
    half = changed(config, "training", precision="bf16")
    half = changed(half, "optimizer", ema_decay=0.9)
    for loss, weights, outputs in run_job(trained_in, 2, with_layout(half, zero_stage=3)):
        assert loss == pytest.approx(exact[0][0], rel=0.02)
        assert weights == {"torch.bfloat16"}
        assert outputs == {"torch.float32"}
