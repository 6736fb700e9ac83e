"""Every kind of layout against one process, with gloo."""

from pathlib import Path
from typing import Any

import pytest
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout

from megavis.planning.layouts import legal_layouts
from megavis.training.parity import train_briefly

STEPS = 5


def by_deepspeed(processes: int, layout: dict[str, Any]) -> Any:
    """Return a layout that does not depend on the version of Megatron-Core."""
    return pytest.param(processes, layout, marks=pytest.mark.once)


# Number of processes, and keys that differ from one process at ZeRO-0.
LAYOUTS: list[Any] = [
    by_deepspeed(1, {"zero_stage": 3}),
    by_deepspeed(2, {"zero_stage": 1}),
    by_deepspeed(4, {"zero_stage": 2}),
    (4, {"zero_stage": 3}),
    by_deepspeed(4, {"zero_stage": 3, "hierarchical_partition_size": 2}),
    by_deepspeed(2, {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    by_deepspeed(2, {"zero_stage": 2, "offload_optimizer": "cpu"}),
    (2, {"tensor_model_parallel_size": 2, "zero_stage": 0, "sequence_parallel": True}),
    (4, {"tensor_model_parallel_size": 4, "zero_stage": 1}),
    (4, {"tensor_model_parallel_size": 2, "zero_stage": 1, "sequence_parallel": True}),
    (
        2,
        {
            "tensor_model_parallel_size": 2,
            "zero_stage": 2,
            "sequence_parallel": True,
            "offload_optimizer": "cpu",
        },
    ),
    (
        2,
        {
            "tensor_model_parallel_size": 2,
            "zero_stage": 3,
            "sequence_parallel": True,
            "offload_optimizer": "cpu",
        },
    ),
    (4, {"tensor_model_parallel_size": 2, "zero_stage": 3, "activation_checkpointing": "full"}),
    (4, {"tensor_model_parallel_size": 2, "zero_stage": 2, "sequence_parallel": True}),
    (2, {"context_parallel_size": 2, "zero_stage": 0}),
    (4, {"context_parallel_size": 4, "zero_stage": 1, "activation_checkpointing": "full"}),
    (4, {"context_parallel_size": 2, "zero_stage": 2}),
    (4, {"context_parallel_size": 2, "zero_stage": 3, "activation_checkpointing": "selective"}),
    (
        4,
        {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "sequence_parallel": True,
            "zero_stage": 1,
        },
    ),
    (
        4,
        {
            "context_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "activation_checkpointing": "full",
        },
    ),
    (2, {"pipeline_model_parallel_size": 2, "zero_stage": 0}),
    (4, {"pipeline_model_parallel_size": 2, "activation_checkpointing": "selective"}),
    (
        4,
        {
            "tensor_model_parallel_size": 2,
            "zero_stage": 3,
            "sequence_parallel": True,
            "activation_checkpointing": "selective",
        },
    ),
    (3, {"pipeline_model_parallel_size": 3, "zero_stage": 1}),
    by_deepspeed(4, {"pipeline_model_parallel_size": 2, "zero_stage": 2}),
    by_deepspeed(
        4,
        {
            "pipeline_model_parallel_size": 2,
            "zero_stage": 3,
            "hierarchical_partition_size": 2,
            "activation_checkpointing": "full",
        },
    ),
    (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "zero_stage": 3,
        },
    ),
    (
        4,
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 3},
    ),
    (
        4,
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "activation_checkpointing": "full",
        },
    ),
]


@pytest.fixture(scope="module")
def reference(run_job: Any, tiny_config: Path) -> Any:
    """Curves of one process at ZeRO-0 by overrides, each trained once."""
    curves: dict[tuple[str, ...], Any] = {}

    def curve(*overrides: str) -> Any:
        if overrides not in curves:
            config = make_config(tiny_config, *overrides)
            curves[overrides] = run_job(train_briefly, 1, config, STEPS)[0]
        return curves[overrides]

    return curve


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=lambda v: str(v)[:90])
def test_layouts_match_one_process(
    run_job: Any, reference: Any, tiny_config: Path, processes: int, layout: dict[str, Any]
) -> None:
    config = with_layout(make_config(tiny_config), **layout)
    curves = run_job(train_briefly, processes, config, STEPS)
    assert largest_difference(curves, reference()) <= TOLERANCE


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        by_deepspeed(2, {"zero_stage": 3}),
        (
            4,
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "sequence_parallel": True,
            },
        ),
    ],
)
def test_bert_masks_are_the_same_in_every_layout(
    run_job: Any, reference: Any, tiny_config: Path, processes: int, layout: dict[str, Any]
) -> None:
    config = with_layout(make_config(tiny_config, "objective.mode=bert"), **layout)
    curves = run_job(train_briefly, processes, config, STEPS)
    assert largest_difference(curves, reference("objective.mode=bert")) <= TOLERANCE


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_extra_tensors_are_sent_between_stages(
    run_job: Any, reference: Any, tiny_config: Path, sequence_parallel: bool
) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    rotary = "model.positions=rope_2d"
    config = with_layout(
        make_config(tiny_config, rotary), sequence_parallel=sequence_parallel, **layout
    )
    curves = run_job(train_briefly, 4, config, STEPS)
    assert largest_difference(curves, reference(rotary)) <= TOLERANCE
    assert reference(rotary) != reference()


def test_legal_layouts(tiny_config: Path) -> None:
    config = make_config(tiny_config)
    layouts = list(legal_layouts(config, 4))
    sizes = {
        (p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size)
        for p in layouts
    }
    # Three layers do not fill four stages.
    alone = {(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2)}
    assert sizes == alone | {(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)}
    assert {p.zero_stage for p in layouts if p.pipeline_model_parallel_size > 1} == {0, 1, 2, 3}
    assert all(not p.sequence_parallel for p in layouts if p.tensor_model_parallel_size == 1)
