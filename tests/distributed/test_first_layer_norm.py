"""A custom first layer with a norm: the right one matches one process, the wrong one raises."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from torch import nn

from megavis.composition.model import Model
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.model.core import Core
from megavis.model.embeddings import WholeNorm
from megavis.model.norms import Norm
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_virtual_context
from megavis.parallel.launch import Launch
from megavis.training.parity import Curve, train_briefly

STEPS = 4
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_stage": 1}
WORDS = [f"parallel.{key}={str(value).lower()}" for key, value in SPLIT.items()]


def split_norm(core: Core) -> Norm:
    """Build what a block's norm is built with."""
    return Norm(core.megatron, core.megatron.hidden_size, core.megatron.layernorm_epsilon)


def normalized_content(norm: Any, part: Any, objective: Model, role: str) -> Any:
    """Return a part of the first layer, that of the content with a norm behind it."""
    built = part(objective, role)
    return nn.Sequential(built, norm(objective.core)) if role == "content" else built


def with_a_norm(norm: Any) -> Any:
    """Give the first layer of every paper a norm, within the block."""

    def part(objective: Model, role: str) -> Any:
        return normalized_content(norm, plain, objective, role)

    plain = Model.part
    return mock.patch.object(Model, "part", part)


def normed_curve(launch: Launch, config: RunConfig) -> Curve:
    """Train with a norm in the first layer."""
    with with_a_norm(WholeNorm):
        return train_briefly(launch, config, STEPS)


def test_whole_norm_matches_one_process(run_job: Any, tiny_config: Path) -> None:
    config = make_config(tiny_config)
    reference = run_job(normed_curve, 1, config)[0]
    curves = run_job(normed_curve, 2, with_layout(config, **SPLIT))
    assert largest_difference(curves, reference) <= TOLERANCE


@pytest.mark.parametrize("nested", [False, True])
def test_norm_of_split_tokens_raises(tiny_config: Path, nested: bool) -> None:
    norm = (lambda core: nn.Sequential(split_norm(core))) if nested else split_norm
    context = open_virtual_context(0, 2, ParallelConfig(tensor_model_parallel_size=2))
    try:
        with with_a_norm(norm):
            objective = build_objective(load_config(tiny_config, WORDS).config, context)
            with pytest.raises(TypeError, match=r"in the first layer is a norm of split tokens"):
                objective.layer_plans()[0].build()
    finally:
        close_context()


def test_norm_of_split_tokens_is_right_without_sequence_parallelism(tiny_config: Path) -> None:
    """Nothing is split then, and both norms are the same."""
    context = open_virtual_context(0, 2, ParallelConfig(tensor_model_parallel_size=2))
    try:
        with with_a_norm(functools.partial(split_norm)):
            config = load_config(tiny_config, [WORDS[0]]).config
            build_objective(config, context).layer_plans()[0].build()
    finally:
        close_context()
