"""gpu_check's part on Transformer Engine: skipped with a reason, and computed with the stand-in."""

from types import SimpleNamespace

import pytest
import torch
from engine_jobs import stand_in

from benchmarks.gpu_check import engine
from benchmarks.gpu_check.results import Settings
from megavis.model.kernels import chosen_kernels
from megavis.parallel.launch import read_launch


def rows_of(settings):
    rows = engine.transformer_engine(read_launch({}), settings)
    assert chosen_kernels() == "auto"
    return rows


def test_skipped_without_a_gpu_or_the_library(tmp_path):
    (row,) = rows_of(Settings("cpu", True, tmp_path))
    assert (row.value, row.passed, row.note) == (None, None, "skipped: it needs a GPU")
    (row,) = rows_of(Settings("cuda", True, tmp_path))
    assert row.value is None
    assert row.note.startswith("skipped: training.kernels: transformer_engine needs NVIDIA")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_compares_with_plain_kernels(tmp_path, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    # A GPU by name, whose job is of a CPU.
    settings = SimpleNamespace(device="cpu", on_gpu=True, small=True, folder=tmp_path)
    with stand_in():
        *bf16, last = rows_of(settings)
    assert all(row.passed for row in bf16)
    assert bf16[0].what == "Transformer Engine: gvp/demo.yaml, bf16: loss"
    if capability < (8, 9):
        assert last.note == "skipped: this GPU has no FP8"
        return
    assert last.what == "Transformer Engine: gvp/demo.yaml, FP8: gradients"
    assert last.value > bf16[1].value, "FP8 is noisier than bf16"
    assert bf16[-1].value > 0
