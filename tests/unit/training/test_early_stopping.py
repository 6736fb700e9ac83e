"""Early stopping: patience, resume, and the split of the validation images."""

import json

import numpy as np
import pytest

from megavis.checkpoint.format.folder import prune, saved_steps
from megavis.data.loading.dataset import ShardDataset, halves, shuffled
from megavis.training.callbacks.validation import EarlyStopping


@pytest.mark.parametrize(
    ("accuracies", "best", "over"),
    [
        ([], None, False),
        ([0.5], 10, False),
        ([0.5, 0.6, 0.7], 30, False),
        ([0.5, 0.7, 0.6], 20, False),
        ([0.5, 0.7, 0.6, 0.7], 20, True),
        ([0.5, 0.7, 0.6, 0.8], 40, False),
        ([0.7, 0.7, 0.7], 10, True),
    ],
)
def test_stops_after_patience_evaluations_without_improvement(accuracies, best, over):
    history = [(10 * (i + 1), accuracy) for i, accuracy in enumerate(accuracies)]
    assert EarlyStopping(2, history).best_step == best
    assert EarlyStopping(2, history).is_over == over
    assert not EarlyStopping(0, history).is_over


def test_resume_restores_history_up_to_the_step(tmp_path, context):
    lines = [json.dumps({"step": step, "validation_accuracy": step / 100}) for step in (0, 5, 10)]
    lines.insert(2, json.dumps({"step": 7, "loss": 1.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 12, "validation_acc']))
    assert EarlyStopping.resume(3, tmp_path, 10, context).history == [(5, 0.05), (10, 0.1)]
    assert EarlyStopping.resume(3, tmp_path, 9, context).history == [(5, 0.05)]
    assert EarlyStopping.resume(3, tmp_path, 0, context).history == []


def test_prune_keeps_the_best_checkpoint(tmp_path):
    for step in (1, 2, 3, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    prune(tmp_path, keep_last=1, keep_every=0, keep_at=[2])
    assert saved_steps(tmp_path) == [2, 4]


def test_validation_halves_are_disjoint(shard_folders):
    whole = ShardDataset(shard_folders / "validation")
    one, other = halves(whole)
    assert sorted([*one.indices, *other.indices]) == list(range(36))
    assert len(one) == len(other) == 18
    order = shuffled(whole)
    # Shards are sorted by class; a shuffled prefix contains every class.
    assert set(order.read(np.arange(12))[1]) == {0, 1, 2}
    ids, labels = order.read(np.arange(5), positions=np.zeros(5, np.int64))
    expected, names = whole.read(order.indices[:5])
    assert (ids == expected).all()
    assert (labels == names).all()
