"""The config of a VAE that trains in seconds."""

import torch

from megavis.checkpoint.state.save import write_weights
from megavis.config.load import dump_config, load_config
from megavis.tokenizers.vae import VAENetwork

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


def write_untrained_run(folder, seed=0):
    """Write the run folder of an untrained VAE; return the folder."""
    config = load_config(write_config(folder)).config
    (folder / "config.yaml").write_text(dump_config(config))
    torch.manual_seed(seed)
    network = VAENetwork(config.objective.shape)
    weights = {f"vae.network.{name}": value for name, value in network.state_dict().items()}
    write_weights(folder, weights, seed=0, tokenizer=None)
    return folder
