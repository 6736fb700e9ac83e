"""Restarts without progress, and an interrupted validation."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megavis.config.errors import UserError
from megavis.data.loading.dataset import ShardDataset
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import read_launch
from megavis.training.callbacks.callback import StepState
from megavis.training.callbacks.validation import Validate
from megavis.training.faults.interruption import count_restart, is_automatic


@pytest.fixture
def context():
    yield open_context(read_launch({}), device="cpu")
    close_context()


def test_restarts_from_one_checkpoint_come_to_an_end(context, tmp_path, monkeypatch):
    def start(step):
        count_restart(tmp_path, step, 2, context)

    for _ in range(5):  # by hand
        start(100)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start(100)
    start(100)
    start(200)  # a new checkpoint: counted anew
    start(200)
    with pytest.raises(UserError, match=r"restarted 2 times .* since step 200 \(training.max_re"):
        start(200)
    start(200)  # started by hand after that, it may try again


@pytest.mark.parametrize(
    ("environment", "automatic"),
    [
        ({}, False),
        ({"SLURM_RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"SLURM_RESTART_COUNT": "2"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
    ],
)
def test_a_scheduler_says_that_it_has_started_again(environment, automatic):
    assert is_automatic(environment) == automatic


def test_a_validation_is_broken_off_where_time_presses(context, shards):
    answers = []

    def is_urgent():
        answers.append(True)
        return True

    engine = SimpleNamespace(
        layers=None, context=context, micro_batch_size=2, evaluated=nullcontext
    )
    state = StepState(4, 8, None, engine)
    Validate(ShardDataset(shards / "validation"), 4, 16, is_urgent=is_urgent)(state)
    assert (state.record, answers) == ({}, [True])
