"""The config of a VAE of label maps that trains in seconds."""

from __future__ import annotations

from pathlib import Path

OBJECTIVE = (
    "{{name: vae_label_maps, target: {kind}, semantic_channels: 6, instance_channels: 8,"
    " depth_bins: 16, patch_size: {patch}, downsampling: {latent}, latent_channels: 4,"
    " decoder_layers: 2, beta: 2.5e-4}}"
)
SMALL = """\
name: {kind}
output: {folder}/runs
objective: {objective}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, normalization: layer_norm,
  activation: gelu_tanh, add_bias: true}}
data: {{train: {folder}/{kind}/train, validation: {folder}/{kind}/validation, image_size: 32,
  crop: random_resized, scale: [0.3, 1.0], flip: true}}
optimizer: {{learning_rate: 3e-3, betas: [0.9, 0.95], gradient_clipping: 1.0}}
training: {{steps: 30, batch_size: 12, log_every: 10, validate_every: 15, validation_images: 4,
  sample_every: 30, sample_images: 2}}
"""


def write_label_map_config(folder: Path, kind: str) -> Path:
    """Write the config for the shards of a kind of maps below `folder`; return its path."""
    objective = OBJECTIVE.format(kind=kind, patch=4, latent=8)
    path = folder / f"{kind}.yaml"
    path.write_text(SMALL.format(kind=kind, folder=folder, objective=objective))
    return path
