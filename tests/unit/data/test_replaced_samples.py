"""Damaged samples are replaced and reported."""

from types import SimpleNamespace

import numpy as np
import pytest
from shard_folder import write_folder

from megavis.data.loading.dataset import ShardDataset
from megavis.training.callbacks.callback import ReportReplacedSamples, StepState

pytestmark = pytest.mark.once


def test_replaced_samples_are_named_once_and_counted(context, tmp_path, capsys):
    tokens = np.ones((5, 16), int)
    tokens[[1, 3], 5] = 300
    write_folder(tmp_path, tokens=tokens, labels=[-1] * 5, vocabulary=200, class_names=[])
    dataset = ShardDataset(tmp_path)
    report = ReportReplacedSamples(2, dataset, context)
    records = []
    for step, indices in enumerate([[0], [0, 1], [2], [3], [1, 3]]):
        dataset.read(np.array(indices))
        state = StepState(step, 4, None, None)
        report(state)
        records.append(state.record)
    assert records == [{}, {}, {"samples_replaced": 1}, {}, {"samples_replaced": 2}]
    stderr = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in stderr] == [
        f"data: shard-000000.tar:{number:09}: token beyond the vocabulary" for number in (1, 3)
    ]


@pytest.mark.parametrize("counts", [(20, 21, 25), (25, 26), (7, 30)])
@pytest.mark.parametrize("known", [0, 30])
def test_that_further_replaced_samples_are_not_named_is_said_once(context, capsys, counts, known):
    """Twenty are named by each process, besides the ones that the main process names at start."""
    at_start = [f"length {number}" for number in range(known)]
    data = SimpleNamespace(skipped_names=at_start)
    alone = SimpleNamespace(is_main=False, device=context.device, data=context.data)
    report = ReportReplacedSamples(1, data, alone)
    for step, count in enumerate(counts, 1):
        data.skipped_names = [*at_start, *(f"sample {number}" for number in range(count))]
        report(StepState(step, 9, None, None))
    *named, further = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in named] == [f"data: sample {one}" for one in range(20)]
    assert further == "data: further replaced samples are counted, not named"
