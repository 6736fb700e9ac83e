"""gpu_check's stage for several GPUs: which layouts it compares, and what it says with one GPU."""

import pytest

from benchmarks.gpu_check.models import read_config
from benchmarks.gpu_check.results import Settings
from benchmarks.gpu_check.several_gpus import chosen_layouts, parts
from megavis.parallel.launch import Launch
from megavis.planning.layouts import layout_name
from megavis.training.parity import parity_config

pytestmark = pytest.mark.once

SIZES = (
    "model.hidden_size=128",
    "model.num_attention_heads=8",
    "model.num_layers=8",
    "training.batch_size=16",
    "training.micro_batch_size=1",
    "parallel.zero_stage=1",
)


def test_one_gpu_has_nothing_to_exchange(tmp_path):
    [(name, measure)] = parts(Settings("cuda", False, tmp_path, processes=1)).items()
    [row] = measure(Launch(0, 1, 0, "127.0.0.1", 1), Settings("cuda", False, tmp_path))
    assert (name, row.value, row.passed) == ("several GPUs", None, None)
    assert row.note == "skipped: it needs two GPUs or more"


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_axis_is_compared_by_two_and_by_all(precision):
    words = (*SIZES, f"training.precision={precision}")
    config = parity_config(read_config("igpt/demo.yaml", words))
    plain = [f"tp1-pp1-zero{stage}" for stage in range(4)][precision == "bf16" :]
    for processes in (4, 8):
        found = [layout_name(parallel) for parallel in chosen_layouts(config, processes)]
        assert len(found) == len(set(found))
        assert found[: len(plain)] == plain
        assert all(name in plain or "-zero1" in name for name in found)
        for size in (2, processes):
            alone = {f"tp{size}-pp1", f"tp1-cp{size}-pp1", f"tp1-pp{size}"}
            assert alone <= {name.partition("-zero")[0] for name in found}
            assert f"tp{size}-pp1-zero1-sp" in found
    assert "tp2-cp2-pp2-zero1-sp" in found
    assert not any("4" in name for name in found)
