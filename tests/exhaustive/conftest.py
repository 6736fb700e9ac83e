"""Configs of all small models, with shards of each kind."""

from collections.abc import Callable
from pathlib import Path

import pytest
from golden_givt import import_golden
from latent_shards import write_latent_shards
from scene_shards import write_scene_shards
from small_configs import SMALL
from small_vqgan import write_untrained_run


@pytest.fixture(scope="module")
def write_config(
    shards: Path, image_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Write the config of a small model with two blocks of 32 channels; return its path."""
    folder = tmp_path_factory.mktemp("small")
    latents = folder / "latents"
    write_latent_shards(latents, shape=(4, 4, 4), num_classes=3, num_images=60)
    scenes = write_scene_shards(folder, images=24)
    images = f"{{train: {image_shards}/train, validation: {image_shards}/validation, image_size: 16"
    kinds = {
        "images": f"{images}, crop: random_resized, flip: true}}",
        "palette": f"{{train: {shards}/train, image_size: 8}}",
        "latents": f"{{train: {latents}, image_size: 16}}",
        "encoded": f"{images}}}",
        "label_maps": f"{{train: {scenes}/panoptic/train, image_size: 16, crop: random_resized}}",
    }
    runs = {"TOKENIZER": str(write_untrained_run(folder)), "VAE": import_golden(folder, "vae")}

    def write(name: str) -> Path:
        small, path = SMALL[name], folder / f"{name}.yaml"
        objective = small.objective
        for word, run in runs.items():
            objective = objective.replace(word, run)
        validate = ", validate_every: 1" if "finetune" in small.rest else ""
        path.write_text(
            f"""\
name: {name}
output: {folder}/runs
objective: {objective}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  normalization: layer_norm
  add_bias: true
  {small.model}
data: {kinds[small.data]}
optimizer: {{learning_rate: 1e-3, gradient_clipping: 0.5}}
training: {{steps: 4, batch_size: 12, micro_batch_size: 3{validate}}}
{small.rest}
"""
        )
        return path

    return write
