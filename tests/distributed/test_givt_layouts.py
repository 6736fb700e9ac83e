"""GIVT in several layouts: causal, masked, with an adapter, and encoder-decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_givt import (
    GOLDEN,
    MODELS,
    causal_weights_of_width_16,
    conditions,
    golden,
    import_file,
    import_golden,
)
from layout_curves import TOLERANCE, largest_difference, make_config, with_layout
from run_jobs import train_run

from data_tools.__main__ import main as data_tools
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.config.section import ParallelConfig
from megavis.data.loading.loader import BatchLoader
from megavis.model.core import Block
from megavis.notebook import Run
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.training.engine import Engine
from megavis.training.parity import train_briefly
from megavis.training.trainer import Trainer

STEPS = 10
KEYS = "latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 2"
OBJECTIVES = {
    "causal": f"{{name: givt, {KEYS}}}",
    "adapter": f"{{name: givt, {KEYS}, adapter_blocks: 2}}",
    "masked": f"{{name: givt_maskgit, {KEYS}}}",
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 3}),
    (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
]


@pytest.fixture(scope="module")
def latent_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A config on random latents of three classes, which differ in their means."""
    from latent_shards import write_latent_shards

    folder = tmp_path_factory.mktemp("latents")
    write_latent_shards(folder / "train", shape=(4, 4, 4), num_classes=3, num_images=60)

    def config(name: str, *, dropout: float = 0.0) -> Path:
        path = folder / f"{name}.yaml"
        path.write_text(
            f"""\
name: {name}
output: {folder}/runs
objective: {OBJECTIVES[name]}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  norm_bias: last
  add_bias: true
  attention_bias: false
  attention_output_dropout: {dropout}
  attention_dropout: {dropout}
  mlp_dropout: {dropout}
data: {{train: {folder}/train, image_size: 16}}
optimizer: {{learning_rate: 1e-3}}
training: {{steps: {STEPS}, batch_size: 8, micro_batch_size: 2}}
"""
        )
        return path

    return config


@pytest.mark.parametrize(
    "name", ["causal", pytest.param("adapter", marks=pytest.mark.once), "masked"]
)
def test_layouts_match_one_process(run_job: Any, latent_config: Any, name: str) -> None:
    config = make_config(latent_config(name))
    reference = run_job(train_briefly, 1, config, STEPS)[0]
    assert reference[-1][0] < reference[0][0], "the loss does not fall"
    for processes, layout in LAYOUTS:
        # The masked model's 16 tokens and label cannot be split in two.
        if name != "masked" or "sequence_parallel" not in layout:
            curves = run_job(train_briefly, processes, with_layout(config, **layout), STEPS)
            assert largest_difference(curves, reference) <= TOLERANCE, layout


@pytest.mark.once
def test_masked_tokens_weigh_the_same_in_every_micro_batch(
    run_job: Any, latent_config: Any
) -> None:
    """One process with all images of a step at once has the loss of the paper's formula."""
    path, steps = latent_config("masked"), 4
    whole = make_config(path, "training.micro_batch_size=8")
    reference = run_job(train_briefly, 1, whole, steps)[0]
    for micro, processes, layout in (
        (1, 1, {}),
        (4, 2, {"zero_stage": 0}),
        (1, 2, {"zero_stage": 2}),
        (2, 4, {"pipeline_model_parallel_size": 2, "zero_stage": 1}),
    ):
        split = make_config(path, f"training.micro_batch_size={micro}")
        curves = run_job(train_briefly, processes, with_layout(split, **layout), steps)
        assert largest_difference(curves, reference) <= TOLERANCE, (layout, micro)


def dropped(launch: Launch, config: RunConfig) -> dict[str, np.ndarray]:
    """Take a step; return activations of the first block in the last forward pass."""
    context = open_context(launch, config.parallel, device="cpu")
    try:
        run = Trainer.open(config, context)
        engine = Engine(run.objective)
        seen: dict[str, np.ndarray] = {}
        blocks = [m for m in engine.layers.modules if isinstance(m, Block)]

        def keep(name: str) -> Any:
            return lambda module, given, out: seen.update({name: out.detach().numpy().copy()})

        blocks[0].register_forward_hook(keep("hidden"))
        blocks[0].mlp.activation_func.register_forward_hook(keep("features"))
        with BatchLoader(
            run.train_data,
            seed=config.seed,
            micro_batch_size=engine.micro_batch_size,
            data_parallel_rank=context.data.rank,
            data_parallel_size=context.data.size,
            accumulation_steps=engine.accumulation_steps,
        ) as loader:
            engine.train_step(loader, 0)
        return seen
    finally:
        close_context()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dropout_under_tensor_parallelism(run_job: Any, latent_config: Any, recompute: str) -> None:
    path = latent_config("causal", dropout=0.5)
    config = with_layout(
        load_config(path).config,
        tensor_model_parallel_size=2,
        activation_checkpointing=recompute,
    )
    first, second = run_job(dropped, 2, config)
    np.testing.assert_array_equal(first["hidden"], second["hidden"])
    masks = [part["features"] == 0 for part in (first, second)]
    assert 0.4 < masks[0].mean() < 0.6
    # Two independent halves agree on half of the features.
    assert 0.4 < (masks[0] == masks[1]).mean() < 0.6


@pytest.fixture(scope="module")
def conditioned_config(
    shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunConfig]:
    """A config on pairs whose targets the golden VAE encodes as latents."""
    folder = tmp_path_factory.mktemp("conditioned")
    crops = str(shards / "crops" / "validation")
    options = ["--size", "16", "--target-resize", "bicubic"]
    assert data_tools(["pairs", crops, crops, "--out", str(folder / "pairs"), *options]) == 0
    path, vae = folder / "config.yaml", import_golden(folder, "vae")
    path.write_text(
        f"""\
name: conditioned
output: {folder}/runs
objective:
  name: givt_encoder_decoder
  latent_channels: 8
  downsampling: 4
  encoder_layers: 1
  encoder_patch_size: 4
  tokenizer: {vae}
model:
  {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, normalization: layer_norm,
  norm_bias: last, add_bias: true, attention_bias: false}}
data: {{train: {folder}/pairs, image_size: 16}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 3, batch_size: 4, micro_batch_size: 1}}
"""
    )
    return lambda **layout: with_layout(make_config(path), **layout)


def test_encoder_layouts_match_one_process(
    run_job: Any, conditioned_config: Callable[..., RunConfig]
) -> None:
    reference = run_job(train_briefly, 1, conditioned_config(), 3)[0]
    assert reference[-1][0] < reference[0][0], "the loss does not fall"
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layouts = (
        (2, {"zero_stage": 3, "activation_checkpointing": "full"}),
        (4, {"pipeline_model_parallel_size": 2, **split}),
    )
    for processes, layout in layouts:
        curves = run_job(train_briefly, processes, conditioned_config(**layout), 3)
        assert largest_difference(curves, reference) <= TOLERANCE, layout


@pytest.fixture(scope="module")
def pretrained_run(
    run_job: Any, image_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """An MAE with the sizes of the encoder, trained for two steps at another size of images."""
    folder = tmp_path_factory.mktemp("pretrained")
    path = folder / "config.yaml"
    path.write_text(
        f"""\
name: mae
output: {folder}/runs
objective:
  {{name: mae, patch_size: 4, class_token: false,
  decoder: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2}}}}
model:
  {{num_layers: 1, hidden_size: 32, num_attention_heads: 4, normalization: layer_norm,
  add_bias: true}}
data: {{train: {image_shards}/train, image_size: 8, crop: window}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 2, batch_size: 4}}
"""
    )
    run_job(train_run, 1, str(path), [])
    return str(folder / "runs" / "mae")


def test_a_pretrained_encoder_starts_alike_in_all_layouts(
    run_job: Any, conditioned_config: Callable[..., RunConfig], pretrained_run: str
) -> None:
    def config(**layout: Any) -> RunConfig:
        random = conditioned_config(**layout)
        objective = random.objective.model_copy(update={"encoder_from_run": pretrained_run})
        return random.model_copy(update={"objective": objective})

    reference = run_job(train_briefly, 1, config(), 2)[0]
    random = run_job(train_briefly, 1, conditioned_config(), 2)[0]
    assert largest_difference([random[:1]], reference[:1]) > 1e-3, "the run was not read"
    for layout in (
        {"zero_stage": 3},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
    ):
        curves = run_job(train_briefly, 2, config(**layout), 2)
        assert largest_difference(curves, reference) <= TOLERANCE, layout


def split_outputs(
    launch: Launch, run_folder: str, inputs: np.ndarray, given: dict[str, torch.Tensor]
) -> np.ndarray:
    """Return the outputs of an imported run under tensor parallelism of all processes."""
    open_context(launch, ParallelConfig(tensor_model_parallel_size=launch.world_size), device="cpu")
    try:
        run = Run.open(run_folder, device="cpu")
        return run.outputs(torch.from_numpy(inputs), **given).numpy()
    finally:
        close_context()


@pytest.mark.parametrize("name", MODELS)
def test_golden_values_under_tensor_parallelism(run_job: Any, tmp_path: Path, name: str) -> None:
    run, values = import_golden(tmp_path, name), golden(name)
    # All sizes that divide four heads; tests/unit covers one process.
    for size in (2, 4):
        for outputs in run_job(split_outputs, size, run, values["tokens"], conditions(values)):
            np.testing.assert_allclose(outputs, values["logits"], rtol=0, atol=1e-4)


def test_golden_vae_on_two_processes(run_job: Any, tmp_path: Path) -> None:
    run, values = import_golden(tmp_path, "vae"), golden("vae")
    for outputs in run_job(split_outputs, 2, run, values["image01"], {}):
        made = np.moveaxis(outputs, 1, -1)
        np.testing.assert_allclose(made, values["moments"], rtol=0, atol=1e-4)


@pytest.fixture
def adapted_run(tmp_path: Path) -> str:
    """A run with the golden adapter and a Transformer of the causal model's sizes."""
    file = tmp_path / "plain.npz"
    np.savez(file, **causal_weights_of_width_16())
    words = ["--adapter", str(GOLDEN / "adapter.npz"), "--num-classes", "10"]
    return import_file(tmp_path, "givt", file, *words)


def test_golden_adapter_on_two_processes(run_job: Any, adapted_run: str) -> None:
    values = golden("adapter")
    latents, expected = np.moveaxis(values["z"], -1, 1).copy(), values["y"]
    for outputs in run_job(split_outputs, 2, adapted_run, latents, {}):
        # The adapter's outputs follow the density's parameters.
        adapted = outputs[..., -16:].reshape(expected.shape)
        np.testing.assert_allclose(adapted, expected, rtol=0, atol=1e-4)
