"""GIVT in several layouts, and its golden values on two processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_layouts import TOLERANCE, largest_difference, make_config, with_layout

from megavis.cli import main
from megavis.notebook import Run
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.training.parity import train_briefly

STEPS = 10
GOLDEN = Path(__file__).parents[1] / "data" / "givt"
KEYS = "latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 2"
OBJECTIVES = {
    "causal": f"{{name: givt, {KEYS}}}",
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


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_layouts_give_the_curve_of_one_process(run_job: Any, latent_config: Any, name: str) -> None:
    config = make_config(latent_config(name))
    reference = run_job(train_briefly, 1, config, STEPS)[0]
    assert reference[-1][0] < reference[0][0], "nothing was learned"
    for processes, layout in LAYOUTS:
        # The masked model's 16 tokens and the label are odd.
        if name != "masked" or "sequence_parallel" not in layout:
            curves = run_job(train_briefly, processes, with_layout(config, **layout), STEPS)
            assert largest_difference(curves, reference) <= TOLERANCE, layout


def golden_outputs(launch: Launch, run_folder: str, values: dict[str, Any]) -> np.ndarray:
    """Return the outputs of an imported run whose layers two processes share."""
    open_context(launch, tensor_model_parallel_size=2)
    try:
        run = Run.open(run_folder, device="cpu")
        given = {name: torch.from_numpy(value) for name, value in values.items()}
        tokens, labels = given.pop("tokens"), given.pop("labels").long()
        return run.outputs(tokens, labels=labels, **given).numpy()
    finally:
        close_context()


@pytest.mark.parametrize("name", ["givt_causal", "givt_maskgit", "givt_full_covariance"])
def test_golden_values_hold_on_two_processes(run_job: Any, tmp_path: Path, name: str) -> None:
    source = str(GOLDEN / f"{name}.npz")
    folder = str(tmp_path / "run")
    assert main(["import", "givt", source, folder, "--num-classes", "10"]) == 0
    with np.load(source) as archive:
        inputs = ("tokens", "labels", "mask")
        values = {key: archive[key] for key in inputs if key in archive.files}
        expected = archive["logits"]
    for outputs in run_job(golden_outputs, 2, folder, values):
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4)
