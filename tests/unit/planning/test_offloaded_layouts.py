"""Layouts with the optimizer on the CPU are planned only where they can be trained."""

from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.planning.layouts import all_layouts, is_legal, with_layout, with_offload

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[3] / "yaml_configs"


def offloaded(name, num_processes):
    config = load_config(PRESETS / f"{name}.yaml", ["training.steps=10000"]).config
    layouts = list(all_layouts(config, num_processes))
    found = list(with_offload(config, layouts))
    for layout in found:
        assert is_legal(with_layout(config, layout.parallel), num_processes), layout.name
    return layouts, found


def test_adam_is_offloaded_under_zero_without_stages():
    layouts, found = offloaded("igpt/demo", 2)
    assert {layout.parallel.offload_optimizer for layout in found} == {"cpu"}
    expected = [each.name for each in layouts if each.zero_stage and each.pipeline == 1]
    assert [layout.name.replace("-offload", "") for layout in found] == expected


def test_adafactor_is_offloaded_like_adam():
    layouts, found = offloaded("givt/encoder_decoder_coco_panoptic", 2)
    expected = [each.name for each in layouts if each.zero_stage and each.pipeline == 1]
    assert expected
    assert [layout.name.replace("-offload", "") for layout in found] == expected
