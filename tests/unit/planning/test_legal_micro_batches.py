"""Only micro-batches that training accepts are planned; without any, the reason is training's."""

from pathlib import Path

import pytest

from megavis.cli import main
from megavis.config.load import load_config
from megavis.planning.layouts import all_layouts, is_legal, with_layout

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"


def planned(name, num_processes):
    """Return a preset's config, and the layouts of it without model parallelism."""
    config = load_config(PRESETS / f"{name}.yaml").config
    layouts = all_layouts(config, num_processes)
    return config, [each for each in layouts if each.data == num_processes]


@pytest.mark.parametrize(
    "name", ["mae/vit_b16_finetune", "mae/vit_b16", "mae/vit_b16_linear", "igpt/l_32_linear"]
)
def test_training_accepts_every_planned_micro_batch(name):
    config, layouts = planned(name, 32)
    assert layouts
    for layout in layouts:
        micro = {"micro_batch_size": layout.micro_batch_size}
        training = config.training.model_copy(update=micro)
        trained = with_layout(config.model_copy(update={"training": training}), layout.parallel)
        assert is_legal(trained, 32), layout.name


def test_mixup_takes_pairs():
    config, layouts = planned("mae/vit_b16_finetune", 32)
    share = config.training.batch_size // 32
    even = {size for size in range(2, share + 1, 2) if share % size == 0}
    assert {layout.micro_batch_size for layout in layouts} == even


def test_features_are_standardised_over_the_whole_batch():
    config, layouts = planned("mae/vit_b16_linear", 32)
    assert {each.micro_batch_size * 32 for each in layouts} == {config.training.batch_size}


def test_no_legal_layout_is_explained(capsys):
    assert main(["plan", str(PRESETS / "mae/vit_b16_coco.yaml"), "--gpus", "24"]) == 2
    assert (
        "no layout is legal on 24 processes: training.batch_size: 64 is not divisible by the"
        " data-parallel size 24; 72 would"
    ) in " ".join(capsys.readouterr().out.split())
