"""Runs of an earlier search or sweep count only if they were trained as their config says."""

import shutil

import pytest
from tiny import tiny

from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.training.search.trial import check_trial, give_up


@pytest.fixture
def path(image_shards, tmp_path):
    made = tmp_path / "c.yaml"
    objective = "{name: mp3, patch_size: 4, mask_ratio: 0.5}"
    made.write_text(tiny(objective, shards=image_shards, validates=True, output=str(tmp_path)))
    run = load_config(made).config
    run.folder.mkdir()
    (run.folder / "config.yaml").write_text(dump_config(run))
    give_up(run.folder, step=2, steps=3, reason="a spike")
    return made


@pytest.mark.parametrize(
    ("word", "difference"),
    [
        ("optimizer.weight_decay=0.1", "optimizer.weight_decay 0.0, not 0.1"),
        ("optimizer.betas=[0.9, 0.999]", "optimizer.betas (0.9, 0.95), not (0.9, 0.999)"),
        ("schedule.warmup_steps=1", "schedule.warmup_steps 0, not 1"),
        ("training.tf32=true", "training.tf32 False, not True"),
        ("training.validation_images=8", "training.validation_images 256, not 8"),
        ("training.steps=2", "training.steps 3, not 2"),
        ("data.flip=true", "data.flip False, not True"),
        ("data.crop=random_resized", "data.crop none, not random_resized"),
        ("seed=1", "seed 0, not 1"),
    ],
)
def test_a_run_of_other_settings_is_refused(path, word, difference):
    with pytest.raises(UserError, match="this run was") as error:
        check_trial(load_config(path, [word]).config)
    assert difference in str(error.value)


@pytest.mark.parametrize(
    "word",
    ["training.steps=4", "training.micro_batch_size=2", "checkpoint.every=1", "data.threads=1"],
)
def test_what_results_do_not_depend_on_may_differ(path, word):
    check_trial(load_config(path, [word]).config)


@pytest.mark.parametrize("key", ["data.train", "data.validation"])
def test_folders_are_compared_by_what_they_hold(path, image_shards, tmp_path, key):
    own, other = ("train", "validation") if key == "data.train" else ("validation", "train")
    moved = shutil.copytree(image_shards / own, tmp_path / "moved")
    check_trial(load_config(path, [f"{key}={moved}"]).config)
    with pytest.raises(UserError, match=f"{key} .*holds other images than"):
        check_trial(load_config(path, [f"{key}={image_shards / other}"]).config)
