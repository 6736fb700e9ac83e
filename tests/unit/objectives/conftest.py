"""Small models of the papers, every weight random."""

import pytest
import torch

GVP_CONFIG = """\
name: small
objective: {name: gvp, patch_size: 4, num_groups: 3}
model:
  num_layers: 3
  hidden_size: 16
  num_attention_heads: 2
  normalization: layer_norm
  norm_epsilon: 1e-6
  activation: gelu
  add_bias: true
data: {train: shards/train, image_size: 12}
parallel: {zero_stage: 0}
optimizer: {learning_rate: 1e-2}
training: {steps: 3, batch_size: 8}
"""


@pytest.fixture
def build_gvp(context, tmp_path):
    """Build a GVP of nine patches; every parameter random."""
    from megavis.config.load import load_config
    from megavis.model.runner import Runner
    from megavis.model.stack import LocalLayers, Stack
    from megavis.objectives import OBJECTIVES, objective_configs

    def build(*words):
        path = tmp_path / "gvp.yaml"
        path.write_text(GVP_CONFIG)
        config = load_config(path, words, objectives=objective_configs()).config
        objective = OBJECTIVES["gvp"](config, context)
        plans = objective.layer_plans()
        layers = LocalLayers(plans, list(Stack(plans, objective.loss).layers))
        torch.manual_seed(0)
        for _, parameter in layers.named_parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        return objective, Runner(layers, context)

    return build
