"""Memory planned by `megavis plan` against the memory that engines allocate."""

from pathlib import Path
from typing import Any

import pytest
import vae_config
from memory_jobs import allocated_memory, measure_shape, peak_memory, read

from megavis.planning.activation_memory import activation_memory
from megavis.planning.layouts import Layout
from megavis.planning.states import states_of

pytestmark = pytest.mark.once

PRESETS = Path(__file__).parents[2] / "yaml_configs"
SMALL = ["model.num_layers=2", "training.batch_size=8", "training.micro_batch_size=2"]
HALF, TENSOR = "training.precision=bf16", "parallel.tensor_model_parallel_size=2"
FULL, CONTEXT = "parallel.activation_checkpointing=full", "parallel.context_parallel_size=2"
SELECTIVE = "parallel.activation_checkpointing=selective"
MSE = ["objective.loss=mse", "objective.decoder=linear"]
# A class that modulates norms, and norms of queries and keys.
MODULATED = [
    "objective={name: compose, reads: {kind: colors, vocabulary_size: 512},"
    " schedule: {kind: one_by_one}, asks: {kind: shift}, density: {kind: categorical},"
    " condition: {kind: labels, num_classes: 10, modulation: class_and_row}}",
    "model.qk_norm=true",
]
VOCABULARY = "objective.vocabulary_size=4096"
ZERO, AVERAGE = "parallel.zero_stage=", "optimizer.ema_decay=0.9"
# Of shards, so that no tokenizer is opened.
IDS = "objective.tokenizer=null"


@pytest.mark.parametrize(
    ("name", "num_processes", "words"),
    [
        ("igpt", 1, [ZERO + "0", AVERAGE]),
        ("igpt", 2, [HALF, ZERO + "1"]),
        ("igpt", 1, [ZERO + "0", "optimizer.algorithm=adafactor"]),
        ("darl", 2, [HALF, ZERO + "2", AVERAGE, *MSE]),
        ("givt", 2, [ZERO + "3"]),
        ("igpt", 2, [HALF, TENSOR, ZERO + "1", VOCABULARY]),
        ("mp3", 1, [HALF, ZERO + "1", SELECTIVE]),
        ("igpt", 2, [CONTEXT, ZERO + "1", SELECTIVE]),
        ("gvp", 2, [CONTEXT, ZERO + "2", "objective.num_condition_tokens=2"]),
        ("igpt", 2, [HALF, ZERO + "1", SELECTIVE, *MODULATED]),
        ("igpt", 2, [TENSOR, ZERO + "1", "parallel.sequence_parallel=true", *MODULATED]),
        ("aim", 2, [HALF, ZERO + "1", SELECTIVE]),
        ("rar", 2, [HALF, TENSOR, ZERO + "1", IDS]),
        ("randar", 2, [HALF, ZERO + "2", IDS]),
        ("mar", 2, [ZERO + "1", AVERAGE]),
    ],
)
def test_planned_states_and_activations(
    run_job: Any, name: str, num_processes: int, words: list[str]
) -> None:
    path, words = str(PRESETS / name / "demo.yaml"), [*SMALL, *words]
    (shape,) = run_job(measure_shape, 1, path, words)
    layout = Layout.of(read(path, words), num_processes)
    states = states_of(
        shape.layers, layout, 0, precision=shape.precision, keeps_average=shape.keeps_average
    )
    for found_states, found_saved in run_job(allocated_memory, num_processes, path, words):
        # Between passes no parameters are gathered.
        assert states.total - states.gathered == pytest.approx(found_states, rel=0.1)
        planned = activation_memory(shape, layout)
        assert planned.saved == pytest.approx(found_saved, rel=0.1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("igpt", [TENSOR, "parallel.sequence_parallel=true", FULL]),
        ("igpt", ["parallel.pipeline_model_parallel_size=2"]),
        # The second stage receives and sends, and has as many micro-batches in flight as the first.
        (
            "igpt",
            [
                "parallel.pipeline_model_parallel_size=3",
                "model.num_layers=3",
                "training.micro_batch_size=4",
            ],
        ),
        # The gradient of the logits is most of the peak.
        ("igpt", [HALF, ZERO + "1", "parallel.pipeline_model_parallel_size=2", VOCABULARY]),
        ("igpt", [HALF, ZERO + "1", TENSOR, VOCABULARY]),
        ("rar", [IDS]),
        ("randar", [IDS, TENSOR]),
    ],
)
def test_planned_peak_memory(run_job: Any, name: str, words: list[str]) -> None:
    path, words = str(PRESETS / name / "demo.yaml"), [*SMALL, ZERO + "0", *words]
    (shape,) = run_job(measure_shape, 1, path, words)
    config = read(path, words)
    num_processes = config.parallel.model_parallel_size
    layout = Layout.of(config, num_processes)
    for rank, found in enumerate(run_job(peak_memory, num_processes, path, words)):
        stage = rank if layout.pipeline > 1 else 0
        assert activation_memory(shape, layout, stage).total == pytest.approx(found, rel=0.1)


# Models with a second stack (in the head, behind a bridge, an encoder), at sizes where activations
# outweigh weights.
STACKS = {
    "darl": ["objective.decoder=transformer"],
    "darl_mse": ["objective.loss=mse", "objective.decoder=mlp"],
    "mae": [
        "data.image_size=64",
        "model.hidden_size=128",
        "objective.decoder.hidden_size=64",
        "objective.decoder.num_layers=4",
    ],
    "givt_encoder_decoder": [
        "data.image_size=64",
        "objective.encoder_patch_size=4",
        "objective.encoder_layers=2",
        "objective.downsampling=4",
        "objective.latent_channels=8",
        "model.hidden_size=128",
        "model.ffn_hidden_size=512",
        "training.precision=float32",
    ],
    "aim": ["data.image_size=64"],
    "mar": ["data.image_size=64", "objective.downsampling=4"],
}
FILES = {
    "aim": "aim/demo",
    "mar": "mar/demo",
    "darl": "darl/demo",
    "darl_mse": "darl/demo",
    "mae": "mae/tiny",
    "givt_encoder_decoder": "givt/encoder_decoder",
}
SPLIT, STAGES = "parallel.sequence_parallel=true", "parallel.pipeline_model_parallel_size=2"


@pytest.mark.parametrize(
    ("name", "num_processes", "words"),
    [
        ("darl", 1, [ZERO + "0", FULL]),
        ("darl", 2, [ZERO + "0", TENSOR, FULL]),
        ("darl_mse", 1, [ZERO + "0", FULL]),
        ("mae", 1, [ZERO + "0", FULL]),
        ("mae", 2, [ZERO + "0", TENSOR, SPLIT, FULL]),
        ("mae", 2, [ZERO + "3"]),
        ("mae", 2, [ZERO + "0", CONTEXT, "objective.class_token=false"]),
        ("darl", 2, [ZERO + "0", CONTEXT, FULL]),
        ("givt_encoder_decoder", 1, [ZERO + "0", FULL]),
        ("givt_encoder_decoder", 2, [ZERO + "0", TENSOR, SPLIT]),
        ("darl", 2, [ZERO + "0", STAGES]),
        ("darl", 2, [ZERO + "0", STAGES, FULL, "training.micro_batch_size=2"]),
        ("darl_mse", 2, [ZERO + "0", STAGES]),
        ("mae", 2, [ZERO + "0", STAGES, FULL]),
        # The first stage ends with the bridge.
        ("mae", 2, [ZERO + "0", STAGES, "objective.decoder.num_layers=2"]),
        ("givt_encoder_decoder", 2, [ZERO + "0", STAGES, FULL]),
        ("aim", 1, [ZERO + "0"]),
        ("mar", 1, [ZERO + "0"]),
        ("mar", 2, [ZERO + "0", TENSOR, FULL]),
    ],
)
def test_planned_memory_of_second_stacks(
    run_job: Any, name: str, num_processes: int, words: list[str]
) -> None:
    path = str(PRESETS / f"{FILES[name]}.yaml")
    words = [*SMALL, "training.micro_batch_size=4", *STACKS[name], *words]
    (shape,) = run_job(measure_shape, 1, path, words)
    layout = Layout.of(read(path, words), num_processes)
    if layout.pipeline == 1:
        for found_states, found_saved in run_job(allocated_memory, num_processes, path, words):
            averages = shape.keeps_average
            states = states_of(shape.layers, layout, 0, precision="float32", keeps_average=averages)
            assert states.total - states.gathered == pytest.approx(found_states, rel=0.1)
            assert activation_memory(shape, layout).saved == pytest.approx(found_saved, rel=0.1)
    if layout.zero_stage == 3:
        return  # DeepSpeed decides when parameters are gathered.
    for rank, found in enumerate(run_job(peak_memory, num_processes, path, words)):
        stage = rank if layout.pipeline > 1 else 0
        assert activation_memory(shape, layout, stage).total == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(
    ("num_processes", "words"),
    [
        # The peak is in the VAE's encoder.
        (1, [ZERO + "0", "model.num_layers=1", "model.hidden_size=32"]),
        (2, [ZERO + "0", STAGES, "model.num_layers=2", "model.hidden_size=32"]),
    ],
)
def test_planned_memory_of_a_frozen_vae(
    run_job: Any, tmp_path: Path, num_processes: int, words: list[str]
) -> None:
    path, run = str(PRESETS / "givt/demo.yaml"), vae_config.write_untrained_run(tmp_path)
    latents = ["objective.latent_channels=4", "objective.downsampling=4", "data.image_size=64"]
    words = [*SMALL, *latents, f"objective.tokenizer={run}", *words]
    (shape,) = run_job(measure_shape, 1, path, words)
    layout = Layout.of(read(path, words), num_processes)
    if layout.pipeline == 1:
        states = states_of(
            shape.layers,
            layout,
            0,
            precision="float32",
            keeps_average=shape.keeps_average,
            frozen=shape.frozen,
        )
        ((found_states, _),) = run_job(allocated_memory, 1, path, words)
        assert states.total == pytest.approx(found_states, rel=0.1)
    for rank, found in enumerate(run_job(peak_memory, num_processes, path, words)):
        stage = rank if layout.pipeline > 1 else 0
        assert activation_memory(shape, layout, stage).total == pytest.approx(found, rel=0.1)
