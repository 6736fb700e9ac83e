"""bf16 and fp16 with float32 master weights and gradients, in every kind of layout.

fp16 is slow on a CPU, and DeepSpeed refuses it there; these jobs override that check.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_jobs import deterministic_metrics, rewind, train_run

from megavis.checkpoint.format.folder import latest_checkpoint
from megavis.checkpoint.format.manifest import CheckpointManifest, read_manifest
from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training import engine
from megavis.training.parity import Curve, parity_config, train_briefly

pytestmark = pytest.mark.once

STEPS = 8
# Rounding errors of the formats; the loss is computed from the logits in float32.
RELATIVE_ERROR = {"bf16": 2**-8, "fp16": 2**-11}
LAYOUTS: list[tuple[str, int, list[str]]] = [
    ("bf16", 2, ["zero_stage=1"]),
    ("bf16", 2, ["zero_stage=3"]),
    ("bf16", 2, ["tensor_model_parallel_size=2", "zero_stage=2"]),
    ("bf16", 4, ["tensor_model_parallel_size=2", "sequence_parallel=true", "zero_stage=1"]),
    ("bf16", 2, ["tensor_model_parallel_size=2", "sequence_parallel=true", "zero_stage=2"]),
    ("bf16", 2, ["pipeline_model_parallel_size=2", "zero_stage=1"]),
    ("bf16", 4, ["pipeline_model_parallel_size=2", "zero_stage=3"]),
    ("bf16", 2, ["context_parallel_size=2", "zero_stage=2"]),
    ("fp16", 2, ["zero_stage=1"]),
    ("fp16", 2, ["tensor_model_parallel_size=2", "zero_stage=2"]),
    ("fp16", 4, ["tensor_model_parallel_size=2", "sequence_parallel=true", "zero_stage=3"]),
]
# Two halvings too high for the first gradients of the tiny model; the first overflow does not lower
# the scale.
OVERFLOWING_SCALE_POWER = 24
SAFE_SCALE_POWER = 8


def allow_half() -> None:
    """Make DeepSpeed accept fp16 on a CPU."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


@contextmanager
def initial_scale(power: int) -> Iterator[None]:
    """Start fp16 with a loss scale of two to this power."""
    plain = engine.deepspeed_config

    def settings(*args: Any, **options: Any) -> dict[str, Any]:
        section = plain(*args, **options)
        return {**section, "fp16": {**section["fp16"], "initial_scale_power": power}}

    engine.deepspeed_config = settings
    try:
        yield
    finally:
        engine.deepspeed_config = plain


def short_curve(launch: Launch, path: str, overrides: list[str]) -> Curve:
    """Train a few steps with `parity_config`, from a loss scale at which none overflows."""
    allow_half()
    loaded = load_config(path, overrides)
    with initial_scale(SAFE_SCALE_POWER):
        return train_briefly(launch, parity_config(loaded.config), STEPS)


def train_from_a_high_scale(launch: Launch, path: str, overrides: list[str]) -> None:
    """Train in fp16 from a loss scale whose first gradients overflow."""
    allow_half()
    with initial_scale(OVERFLOWING_SCALE_POWER):
        train_run(launch, path, [*overrides, "training.precision=fp16"])


@pytest.fixture(scope="module")
def reference(run_job: Any, tiny_config: Path) -> Curve:
    return run_job(short_curve, 1, str(tiny_config), [])[0]


@pytest.mark.parametrize(("precision", "processes", "layout"), LAYOUTS, ids=str)
def test_loss_matches_float32_within_rounding(
    run_job: Any,
    reference: Curve,
    tiny_config: Path,
    precision: str,
    processes: int,
    layout: list[str],
) -> None:
    words = [f"training.precision={precision}", *(f"parallel.{word}" for word in layout)]
    curve = run_job(short_curve, processes, str(tiny_config), words)[0]
    losses = [(mine[0], one[0]) for mine, one in zip(curve, reference, strict=True)]
    assert max(abs(mine - one) / one for mine, one in losses) < RELATIVE_ERROR[precision]
    assert any(mine != one for mine, one in losses), f"{precision} was not used"


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.zero_stage=3"],
        ["parallel.zero_stage=2", "parallel.pipeline_model_parallel_size=2"],
    ],
    ids=str,
)
def test_fp16_skips_overflowing_steps_and_resumes_exactly(
    run_job: Any, tiny_config: Path, tmp_path: Path, layout: list[str]
) -> None:
    words = [*layout, f"output={tmp_path}"]
    run_job(train_from_a_high_scale, 2, str(tiny_config), [*words, "name=whole"])
    rewind(tmp_path / "whole", tmp_path / "resumed", 4)
    run_job(train_from_a_high_scale, 2, str(tiny_config), [*words, "name=resumed"])
    whole, resumed = (newest_manifest(tmp_path / name) for name in ("whole", "resumed"))
    assert 0 < whole.optimizer_step < whole.step, "no step overflowed"
    assert whole.loss_scale is not None
    assert whole.loss_scale.scale < 2**OVERFLOWING_SCALE_POWER
    assert resumed.loss_scale == whole.loss_scale
    assert deterministic_metrics(tmp_path / "resumed") == deterministic_metrics(tmp_path / "whole")


def newest_manifest(run: Path) -> CheckpointManifest:
    folder = latest_checkpoint(run)
    assert folder is not None
    return read_manifest(folder)
