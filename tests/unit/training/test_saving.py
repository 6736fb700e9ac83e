"""Checkpoint saving: extra steps, and writer threads that die."""

import re
from types import SimpleNamespace

import pytest
from torch import nn

from megavis.checkpoint.format.folder import latest_checkpoint, prune, saved_steps
from megavis.checkpoint.format.manifest import damages
from megavis.checkpoint.state import save
from megavis.checkpoint.state.save import Snapshot, TrainingProgress
from megavis.config.schema import CheckpointConfig
from megavis.evaluation.event_files import EventFile
from megavis.training.callbacks.callback import SaveCheckpoint, StepState

# The tests end a thread deliberately.
ends_a_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
pytestmark = [pytest.mark.once, ends_a_thread]

LAST = 6


@pytest.fixture
def saving(context, tmp_path, monkeypatch):
    """Save a small layer every second step; the writer dies at the steps in the returned list."""
    layer, dies = nn.Linear(2, 3), []
    states = SimpleNamespace(
        layers=layer,
        context=context,
        kinds=lambda _: ("weight",),
        get=lambda weight, _: weight.detach(),
        optimizer_step=lambda: 0,
    )

    def take(state):
        progress = TrainingProgress(state.step, samples_seen=0, seed=0, tokenizer=None)
        return Snapshot(tmp_path, progress, states)

    real = save.write_tensors

    def write(path, tensors):
        if any(f"{step:08d}" in str(path) for step in dies):
            # SystemExit is not an Exception, so no handler catches it and the thread ends silently.
            raise SystemExit
        return real(path, tensors)

    monkeypatch.setattr(save, "write_tensors", write)
    return SaveCheckpoint(CheckpointConfig(every=2), take, published=lambda: None), dies


def test_extra_steps_are_saved_and_kept(saving, tmp_path):
    """iGPT's Figure 3 needs steps 65,536 · 2^i, which `keep_every` cannot express."""
    every_second, _ = saving
    after_step = SaveCheckpoint(
        CheckpointConfig(every=2, keep_at=(1, 3)),
        every_second._take,
        published=lambda: prune(tmp_path, keep_last=1, keep_every=0, keep_at=(1, 3)),
    )
    for step in range(1, LAST + 1):
        after_step(StepState(step, LAST, None, None))
    assert saved_steps(tmp_path) == [1, 3, LAST]


def test_memory_is_prepared_once_after_the_first_step(saving, tmp_path):
    every_second, _ = saving
    prepared = []
    after_step = SaveCheckpoint(
        CheckpointConfig(every=2),
        every_second._take,
        published=lambda: None,
        prepare=lambda: prepared.append(saved_steps(tmp_path)),
    )
    for step in range(1, LAST + 1):
        after_step(StepState(step, LAST, None, None))
    assert prepared == [[]]


def test_dead_writer_is_reported_and_training_continues(saving, tmp_path, capfd):
    after_step, dies = saving
    dies.append(4)
    counted = []
    for step in range(1, LAST + 1):
        state = StepState(step, LAST, None, None, record={"loss": 1.0})
        after_step(state)
        after_step.record_stall(state)
        counted.append(state.record.get("checkpoints_not_saved", 0))
        if step == 4:
            # Reported at the latest when the next save is due; `latest` is unchanged.
            assert latest_checkpoint(tmp_path).name == "step-00000002"
    assert counted[-1] == after_step.failures == 1
    assert saved_steps(tmp_path) == [2, LAST]
    assert not list(damages(latest_checkpoint(tmp_path)))
    assert not list((tmp_path / "checkpoints").glob(".*.partial"))
    stderr = capfd.readouterr().err
    assert "WARNING: checkpoint of step 4 not saved: " in stderr
    assert "rank-00000.safetensors: the writer thread has died; training continues" in stderr


def test_failed_checkpoint_is_retried_before_the_next_one_is_due(saving, tmp_path):
    every_second, dies = saving
    after_step = SaveCheckpoint(
        CheckpointConfig(every=40), every_second._take, published=lambda: None
    )
    dies += range(40, 50)
    for step in range(1, 81):
        state = StepState(step, 80, None, None)
        after_step.request_retry(state)
        after_step(state)
        if after_step._snapshot is not None:
            after_step._writer.join()
    assert after_step.failures == 2
    # Each failure is noticed two steps later, and the next attempt comes a tenth of 40 steps on.
    assert saved_steps(tmp_path) == [52, 80]


def test_lost_run_folder_is_not_made_again(context, tmp_path):
    """As where its disk is not mounted any more: the mount point would be written to."""
    run = tmp_path / "disk" / "run"
    progress = TrainingProgress(2, samples_seen=0, seed=0, tokenizer=None)
    states = SimpleNamespace(
        layers=nn.Linear(2, 3), context=context, kinds=lambda _: (), optimizer_step=lambda: 0
    )
    snapshot = Snapshot(run, progress, states)
    snapshot.write()
    with pytest.raises(
        OSError, match="checkpoint of step 2 not saved: .*No such file or directory"
    ):
        snapshot.publish()
    events = EventFile(run)
    events.add_scalar(1, "loss", 1.0)
    with pytest.raises(FileNotFoundError):
        events.write()
    assert not run.parent.exists()


def truncate(content):
    return content[:-3]


def lose(content):
    return content[:-3] + bytes(3)


@pytest.mark.parametrize(
    ("loss", "reason"), [(truncate, "incomplete"), (lose, "weight/.* cannot be read back")]
)
def test_write_that_a_disk_loses_is_reported(saving, tmp_path, monkeypatch, capfd, loss, reason):
    """As over quota on NFS, where only closing the file fails, which safetensors ignores."""
    real = save.save_tensors

    def save_tensors(path, *args):
        real(path, *args)
        if "00000004" in str(path):
            path.write_bytes(loss(path.read_bytes()))

    monkeypatch.setattr(save, "save_tensors", save_tensors)
    after_step, _ = saving
    for step in range(1, LAST + 1):
        after_step(StepState(step, LAST, None, None))
    assert saved_steps(tmp_path) == [2, LAST]
    stderr = capfd.readouterr().err
    assert re.search(f"WARNING: checkpoint of step 4 not saved: .*{reason}", stderr), stderr


def test_failed_pruning_is_no_failed_checkpoint(saving, capfd):
    """On NFS a folder whose files are open elsewhere cannot be deleted."""

    def fail():
        raise OSError("Directory not empty")

    every_second, _ = saving
    after_step = SaveCheckpoint(CheckpointConfig(every=2), every_second._take, published=fail)
    for step in range(1, LAST + 1):
        after_step(StepState(step, LAST, None, None))
    assert after_step.failures == 0
    warning = "WARNING: old checkpoints are not deleted: Directory not empty"
    assert capfd.readouterr().err.count(warning) == 3


def test_dead_writer_at_the_last_step_raises(saving, tmp_path):
    after_step, dies = saving
    dies.append(LAST)
    after_step(StepState(2, LAST, None, None))
    with pytest.raises(OSError, match="step 6 not saved: .* the writer thread has died"):
        after_step(StepState(LAST, LAST, None, None))
    assert saved_steps(tmp_path) == [2]
