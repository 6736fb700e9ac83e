"""Loss spikes: detection, history across restarts, and rollback limits."""

import math
import shutil
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from megavis.checkpoint.format.folder import latest_checkpoint, saved_steps, step_folder
from megavis.checkpoint.format.manifest import LossHistory, read_manifest
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import CheckpointConfig, TrainingConfig
from megavis.training.callbacks.callback import StepState
from megavis.training.faults.bad_steps import (
    BadStepStreak,
    SpikeDetector,
    WatchBadSteps,
    roll_back,
)
from megavis.training.faults.corruption_check import CheckReplicas

pytestmark = pytest.mark.once


def test_spike_threshold_uses_the_median_absolute_deviation():
    """Compare with SciPy's median absolute deviation."""
    from scipy.stats import median_abs_deviation

    draw = np.random.default_rng(0)
    losses = [float(one) for one in draw.normal(3.0, 0.1, 60)]
    detector = SpikeDetector(5.0, 20, LossHistory())
    assert not detector.is_spike(1e6)  # no history yet
    for step, loss in enumerate(losses, 1):
        assert detector.take(step, loss, is_bad=False) == 0
    last = losses[-20:]
    limit = statistics.median(last) + 5 * median_abs_deviation(last, scale="normal")
    assert not detector.is_spike(limit - 1e-4)
    assert detector.is_spike(limit + 1e-4)
    assert detector.is_spike(float("nan"))
    assert not SpikeDetector(0.0, 20, detector.history).is_spike(1e6)


def test_constant_losses_tolerate_rounding():
    detector = SpikeDetector(5.0, 4, LossHistory(recent=(2.0,) * 4))
    assert not detector.is_spike(2.0099)
    assert detector.is_spike(2.0101)


def test_streak_of_bad_losses_survives_a_restart():
    detector = SpikeDetector(5.0, 4, LossHistory(recent=(2.0,) * 4))
    assert detector.take(7, 9.0, is_bad=True) == 1
    again = SpikeDetector(
        5.0, 4, LossHistory.model_validate_json(detector.history.model_dump_json())
    )
    assert again.take(8, 9.0, is_bad=True) == 2
    assert again.history.recent == (2.0,) * 4
    assert again.take(9, 2.1, is_bad=False) == 0
    assert again.take(10, 9.0, is_bad=True) == 1


@pytest.fixture(scope="module")
def trained(small_config, tmp_path_factory):
    """Return the config of a four-step run that saved every step."""
    root = tmp_path_factory.mktemp("going_back")
    path = root / "small.yaml"
    path.write_text(
        f"""\
based_on: {small_config}
output: {root}
data: {{validation: null}}
training: {{steps: 4, log_every: 1}}
checkpoint: {{every: 1, keep_last: 5}}
"""
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    return path


def test_checkpoints_at_extra_steps_are_checked_and_know_all_losses(trained, monkeypatch):
    """Steps of `keep_at` are checkpoints like any other."""
    real, checked = CheckReplicas.losses, []

    def note(check, engine, step):
        checked.append(step)
        return real(check, engine, step)

    monkeypatch.setattr(CheckReplicas, "losses", note)
    words = ["name=extra", "checkpoint.every=0", "checkpoint.keep_at=[3]"]
    words += ["training.check_replicas_every=100", "training.log_every=100"]
    assert main(["train", str(trained), "--device", "cpu", *words]) == 0
    run = trained.parent / "extra"
    assert checked == saved_steps(run) == [3, 4]
    for step in checked:
        assert len(read_manifest(step_folder(run, step)).losses.recent) == step


def test_number_of_rollbacks_is_limited(trained, tmp_path, brief_context):
    run = tmp_path / "small"
    shutil.copytree(trained.parent / "small", run)
    settings = TrainingConfig(steps=9, batch_size=8, rollback_margin=1, max_rollbacks=2)
    with pytest.raises(UserError, match="no checkpoint is 1 step "):
        roll_back(run, BadStepStreak(2, 4, next_batch=4), settings, brief_context)
    for times, next_batch in ((1, 4), (2, 9)):
        folder, manifest = roll_back(
            run, BadStepStreak(4, 4, next_batch=next_batch), settings, brief_context
        )
        assert folder == latest_checkpoint(run) == step_folder(run, 2)
        assert saved_steps(run) == [1, 2]
        assert manifest == read_manifest(folder)
        assert manifest.rolled_back is not None
        assert manifest.rolled_back.times == times
        assert manifest.step + manifest.batches_skipped == next_batch + 1
    with pytest.raises(UserError, match="after 2 rollbacks to step 2"):
        roll_back(run, BadStepStreak(4, 4, next_batch=14), settings, brief_context)
    with pytest.raises(UserError, match="or allow rollbacks"):
        roll_back(
            run,
            BadStepStreak(4, 4, next_batch=4),
            TrainingConfig(steps=9, batch_size=8),
            brief_context,
        )


def test_rollback_past_a_damaged_checkpoint_drops_those_after_the_bad_steps(
    trained, tmp_path, brief_context
):
    """They hold the bad steps, and would stay among the newest until the run reaches them."""
    run = tmp_path / "small"
    shutil.copytree(trained.parent / "small", run)
    settings = TrainingConfig(steps=9, batch_size=8, rollback_margin=1, max_rollbacks=2)
    (step_folder(run, 2) / "manifest.json").write_text("{")
    (run / "evaluation").mkdir()
    watched = run / "evaluation" / "watch.jsonl"
    watched.write_text('{"step": 1}\n{"step": 3}\n{"step": 1, "seed": 2}\n')
    folder, _ = roll_back(run, BadStepStreak(4, 4, next_batch=4), settings, brief_context)
    assert folder == latest_checkpoint(run) == step_folder(run, 1)
    assert saved_steps(run) == [1]
    assert watched.read_text() == '{"step": 1}\n{"step": 1, "seed": 2}\n'


def test_rollback_requires_enough_kept_checkpoints(trained, tmp_path):
    tree = yaml.safe_load(trained.read_text())
    tree["training"]["max_rollbacks"] = 1
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match="rolls back by 110 steps .* is 4"):
        load_config(path, [])


def watch_steps(context, losses, *, limit, history=None):
    """Watch steps with these losses, None for a skipped one; return the streak that ends them."""
    settings = TrainingConfig(
        steps=100,
        batch_size=8,
        precision="fp16",
        log_every=1,
        spike_threshold=5.0,
        spike_window=4,
        max_bad_steps=limit,
    )
    history = history or LossHistory()
    watch = WatchBadSteps(settings, CheckpointConfig(), history=history, batches_skipped=0)
    for step, loss in enumerate(losses, 1):
        skipped = torch.tensor(float(loss is None))
        engine = SimpleNamespace(context=context, last_step_was_skipped=lambda value=skipped: value)
        state = StepState(step, 100, torch.tensor(math.nan if loss is None else loss), engine)
        watch(state)
        assert state.rolls_back is (watch.streak is not None)
        if state.rolls_back:
            break
    return watch.streak


@pytest.mark.parametrize(
    ("limit", "streak"), [(1, (5, 5)), (2, (5, 7)), (3, (5, 8)), (4, None), (0, None)]
)
def test_skipped_steps_of_fp16_neither_count_nor_hide_a_streak(brief_context, limit, streak):
    losses = [2.0, 2.0, 2.0, 2.0, 9.0, None, 9.0, 9.0, None, 2.0, 9.0]
    row = watch_steps(brief_context, losses, limit=limit)
    assert (row and (row.first, row.last)) == streak


def test_lower_limit_ends_a_longer_streak(brief_context):
    history = LossHistory(recent=(2.0,) * 4, bad_since=1, bad_steps=7)
    assert watch_steps(brief_context, [9.0], limit=3, history=history) is not None
    assert watch_steps(brief_context, [2.0, 9.0], limit=3, history=history) is None
