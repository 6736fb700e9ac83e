"""Tiny configs for tests that build or train a model in a second."""

import yaml

TREE = """\
name: tiny
objective: {objective}
model: {{num_layers: 2, hidden_size: 16, num_attention_heads: 2}}
data: {{train: {shards}/train, image_size: 16}}
parallel: {{zero_stage: 0}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 3, batch_size: 8}}
"""
VIT = {"normalization": "layer_norm", "norm_epsilon": 1e-6, "activation": "gelu", "add_bias": True}
"""Keys of `model` for Vision Transformer blocks."""
_PATCHES = "reads: {kind: patches, patch_size: 4}"
BLOCK_OBJECTIVES = {
    "igpt": "{name: igpt, vocabulary_size: 12}",
    "gvp": "{name: gvp, patch_size: 4, num_groups: 3}",
    "mp3": "{name: mp3, patch_size: 4, mask_ratio: 0.5}",
    # A stack in the head, and cross-attention to an encoder.
    "darl": "{name: darl, patch_size: 4, loss: diffusion, decoder: transformer}",
    "memory": f"{{name: compose, {_PATCHES}, schedule: {{kind: one_by_one}}, asks: {{kind: shift}},"
    " density: {kind: gaussian_mixture, num_components: 2},"
    " memory: {kind: encoded_image, num_layers: 2, patch_size: 4}}",
}
"""Objectives that use all kinds of blocks between them; images of 12² pixels in patches of 4²."""


def tiny(objective, *, shards="shards", validates=False, **sections):
    """Return a config as YAML.

    Args:
        objective: the section in YAML.
        shards: folder of `train` and `validation`.
        validates: set `data.validation` too.
        sections: keys to add to or replace in a section; or a value that is no mapping, and None to
            omit the section.
    """
    tree = yaml.safe_load(TREE.format(objective=objective, shards=shards))
    if validates:
        tree["data"]["validation"] = f"{shards}/validation"
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return yaml.safe_dump({name: keys for name, keys in tree.items() if keys is not None})
