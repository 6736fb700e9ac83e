"""The config of a VAE that trains in seconds."""

SMALL = """\
name: small
output: {output}
objective: {{name: vae, latent_channels: 4, filters: 32, multipliers: [1, 1, 1],
  blocks_per_level: 1, perceptual_weight: 0, discriminator_filters: 8, beta: 1e-4,
  discriminator_learning_rate: 4e-3, discriminator_betas: [0.5, 0.9]}}
data: {{train: {shards}/train, validation: {shards}/validation, image_size: 16}}
parallel: {{zero_stage: 0}}
optimizer: {{learning_rate: 2e-3, betas: [0.0, 0.99]}}
schedule: {{decay: constant}}
training: {{steps: 10, batch_size: 8, log_every: 1, validate_every: 10, validation_images: 8,
  sample_every: 10, sample_images: 4}}
"""


def write_config(folder, shards="nowhere"):
    path = folder / "vae.yaml"
    path.write_text(SMALL.format(output=folder, shards=shards))
    return path
