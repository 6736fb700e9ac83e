"""Layouts by name: every name is read back, and a refused one has its reason."""

import pytest

from megavis.cli import main
from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.section import ParallelConfig
from megavis.planning.layouts import layout_called, layout_name, legal_layouts

pytestmark = pytest.mark.once

KEYS = {
    "tp": "parallel.tensor_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "zero": "parallel.zero_stage",
    "hpz": "parallel.hierarchical_partition_size",
}


def test_every_name_is_read_back(tiny_config):
    layouts = [*legal_layouts(load_config(tiny_config).config, 4)]
    assert len(layouts) > 50
    assert [layout_called(layout_name(each)) for each in layouts] == layouts


@pytest.mark.parametrize(
    "layout",
    [
        ParallelConfig(zero_stage=3, hierarchical_partition_size=2),
        ParallelConfig(zero_stage=2, offload_optimizer="cpu", activation_checkpointing="full"),
    ],
)
def test_names_of_layouts_that_are_not_enumerated(layout):
    assert layout_called(layout_name(layout)) == layout


@pytest.mark.parametrize("name", ["zero2", "tp2-pp1-zero4", "tp0-pp1-zero1", "", "tp1-pp1-zero1-x"])
def test_a_word_that_is_no_name(name):
    with pytest.raises(UserError, match=f"'{name}' is not the name of a layout; an example is tp"):
        layout_called(name)


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("tp4-cp2-pp1-zero2", {"tp": 4, "cp": 2, "zero": 2}, "4 heads are not divisible by"),
        ("tp1-pp4-zero1", {"pp": 4, "zero": 1}, "3 layers cannot fill 4 pipeline stages; use at"),
        ("tp1-pp1-zero1-hpz2", {"zero": 1, "hpz": 2}, "needs zero_stage 3, not 1; set it to 3"),
    ],
)
def test_a_refused_layout_has_the_reason_that_its_config_has(
    tiny_config, capsys, name, words, reason
):
    assert main(["parity", str(tiny_config), "--processes", "8", "--layouts", name]) == 2
    by_name = capsys.readouterr().err
    assert reason in by_name
    assert len(by_name.splitlines()) <= 2, "a list of names"
    overrides = [f"{KEYS[key]}={value}" for key, value in words.items()]
    checked = ["train", str(tiny_config), "--dry-run", "--processes", "8", *overrides]
    assert main(checked) == 2
    sentence = by_name.splitlines()[0].removeprefix(f"error: --layouts {name}: ")
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("which", ["all", "everything"])
def test_nothing_to_compare_is_no_success(tiny_config, capsys, which):
    words = ["training.batch_size=7", "training.micro_batch_size=1"]
    assert main(["parity", str(tiny_config), *words, "--processes", "5", "--layouts", which]) == 2
    assert "training.batch_size: 7 is not divisible by the" in capsys.readouterr().err
