"""A VQGAN with 12 ids of 4² pixels each that trains in seconds."""

import torch

from megavis.checkpoint.state.save import write_weights
from megavis.config.load import dump_config, load_config
from megavis.tokenizers.vqgan import VQGANNetwork

SMALL = """\
name: small
output: {output}
objective: {{name: vqgan, codebook_size: 12, code_size: 4, filters: 16, multipliers: [1, 1, 1],
  blocks_per_level: 1, latent_channels: 8, norm_groups: 4, perceptual_weight: 0,
  discriminator_filters: 8, codebook_learning_rate: 2e-2}}
data: {{train: {shards}/train, validation: {shards}/validation, image_size: 16}}
parallel: {{zero_stage: 0}}
optimizer: {{learning_rate: 2e-3, betas: [0.0, 0.99]}}
schedule: {{decay: constant}}
training: {{steps: 20, batch_size: 8, log_every: 1, validate_every: 20, validation_images: 16,
  sample_every: 20, sample_images: 4}}
"""


def write_config(folder, shards="nowhere"):
    folder.mkdir(exist_ok=True)
    path = folder / "vqgan.yaml"
    path.write_text(SMALL.format(output=folder, shards=shards))
    return path


def write_untrained_run(folder, seed=0):
    """Write the run folder of an untrained VQGAN; return the folder."""
    config = load_config(write_config(folder)).config
    (folder / "config.yaml").write_text(dump_config(config))
    torch.manual_seed(seed)
    network = VQGANNetwork(config.objective.shape)
    weights = {f"vqgan.network.{name}": value for name, value in network.state_dict().items()}
    write_weights(folder, weights, seed=0, tokenizer=None)
    return folder
