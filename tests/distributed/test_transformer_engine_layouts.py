"""Transformer Engine's layers, by a stand-in, in every kind of layout against plain layers."""

import math
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import brief_run, run_of
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout

from megavis.training.parity import train_briefly

STEPS = 4
SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SIZES = ("model.hidden_size=64", "training.micro_batch_size=4")
RECIPES: dict[str, tuple[str, ...]] = {
    "rms norm without biases": (),
    "layer norm with biases": (
        "model.normalization=layer_norm",
        "model.add_bias=true",
        "model.attention_bias=true",
    ),
}


@pytest.fixture(scope="module")
def plain(run_job: Any, tiny_config: Path) -> Any:
    """Curves of plain layers on one process at ZeRO-0."""
    curves: dict[str, Any] = {}

    def curve(recipe: str) -> Any:
        if recipe not in curves:
            config = make_config(tiny_config, *RECIPES[recipe])
            curves[recipe] = run_job(train_briefly, 1, config, STEPS)[0]
        return curves[recipe]

    return curve


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, {"tensor_model_parallel_size": 2, "zero_stage": 0}),
        (2, SEQUENCE_PARALLEL | {"activation_checkpointing": "full"}),
        (4, SEQUENCE_PARALLEL | {"zero_stage": 2}),
        (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
    ],
    ids=lambda value: str(value)[:90],
)
def test_layouts_match_plain_layers(
    run_job: Any, plain: Any, tiny_config: Path, recipe: str, processes: int, layout: dict[str, Any]
) -> None:
    words = ("training.kernels=transformer_engine", "training.tf32=true")
    config = make_config(tiny_config, *RECIPES[recipe], *words)
    config = with_layout(config, **layout)
    curves = run_job(brief_run, processes, config, STEPS)
    assert largest_difference(curves, plain(recipe)) <= TOLERANCE


def test_fp8_trains_in_bf16_with_split_matrices(run_job: Any, tiny_config: Path) -> None:
    """Layouts round differently, by up to 2⁻⁴ in every factor, so the loss only stays near."""
    words = [*SIZES, "training.precision=bf16", "training.kernels=transformer_engine"]
    losses: dict[str, Any] = {}
    for name, processes, more in (
        ("bf16", 1, []),
        ("fp8", 1, ["training.fp8=true"]),
        ("fp8, split", 2, ["training.fp8=true", *(f"parallel.{k}={v}" for k, v in _words())]),
    ):
        curves = run_job(run_of, processes, str(tiny_config), [*words, *more], STEPS)
        losses[name] = [loss for loss, _ in curves[0]]
        assert all(math.isfinite(number) for step in curves[0] for number in step)
        # Each process reports the mean over all of them.
        assert all(curve == curves[0] for curve in curves)
    assert losses["fp8"] != losses["bf16"]
    assert losses["fp8"][-1] < losses["fp8"][0]
    for name in ("fp8", "fp8, split"):
        assert losses[name] == pytest.approx(losses["bf16"], rel=2.0**-4)


def _words() -> list[tuple[str, Any]]:
    return [(key, str(value).lower()) for key, value in SEQUENCE_PARALLEL.items()]
