"""The presets have the sizes of the released code."""

from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.objectives import build_objective, objective_configs
from megavis.planning.parameters import by_part, count_parameters

FOLDER = Path(__file__).parents[3] / "yaml_configs" / "givt"


@pytest.mark.parametrize(
    ("name", "words", "millions"),
    [
        ("causal_base", [], "86.385"),
        ("causal_default", [], "304.010"),
        ("causal_default", ["objective.adapter_blocks=8"], "304.121"),
        ("causal_large", [], "1664.330"),
        ("causal_large_512", [], "1667.133"),
        ("maskgit", [], "304.014"),
        ("maskgit_512", [], "304.800"),
    ],
)
def test_presets_have_the_published_parameters(context, name, words, millions):
    path = FOLDER / f"{name}.yaml"
    config = load_config(path, words, objectives=objective_configs()).config
    total = sum(by_part(count_parameters(build_objective(config, context))).values())
    assert f"{total / 1e6:.3f}" == millions
