"""Memory planned for fine-tuning against the memory that engines allocate."""

from pathlib import Path
from typing import Any

import pytest
from memory_jobs import allocated_memory, measure_shape, read
from tiny import VIT, tiny

from megavis.planning.activation_memory import activation_memory
from megavis.planning.layouts import Layout
from megavis.planning.states import rank_memory

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("num_processes", "finetune", "words"),
    [
        (2, {"task": "classes", "tuned_blocks": 2}, ["parallel.zero_stage=2"]),
        (1, {"task": "segments", "head_width": 16}, []),
        (
            1,
            {"task": "instances", "head_width": 16, "window": 4, "global_blocks": [4]},
            ["parallel.zero_stage=1", "training.precision=bf16"],
        ),
    ],
)
def test_planned_states_and_activations(
    run_job: Any, tmp_path: Path, num_processes: int, finetune: dict[str, Any], words: list[str]
) -> None:
    path = tmp_path / "finetune.yaml"
    path.write_text(
        tiny(
            "{name: mae, patch_size: 8}",
            model={**VIT, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 2},
            validates=True,
            data={"image_size": 64, "crop": "jittered"},
            training={"batch_size": 4, "micro_batch_size": 1, "validate_every": 1},
            finetune={"num_classes": 5, **finetune},
        )
    )
    (shape,) = run_job(measure_shape, 1, str(path), words)
    layout = Layout.of(read(str(path), words), num_processes)
    states = rank_memory(shape, layout).states
    for found_states, found_saved in run_job(allocated_memory, num_processes, str(path), words):
        assert states.total == pytest.approx(found_states, rel=0.1)
        assert activation_memory(shape, layout).saved == pytest.approx(found_saved, rel=0.1)
