"""Damaged samples are replaced and reported."""

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
