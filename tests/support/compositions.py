"""Sections of `compose` in YAML, and the config of a tiny composition."""

from tiny import VIT, tiny

PALETTE = "reads: {kind: colors, vocabulary_size: 32}"
PATCHES = "reads: {kind: patches, patch_size: 4}"
IDS = "{kind: ids, vocabulary_size: 12, patch_size: 4, tokenizer: run}"
LATENTS = "reads: {kind: latents, channels: 4, patch_size: 4}"
ONE_BY_ONE = "schedule: {kind: one_by_one}"
RANDOM = "schedule: {kind: one_by_one, order: random}"
GROUPS = "schedule: {kind: groups, num_groups: 3}"
SHIFT, CONTENT, BOTH, MASK, QUERY = (
    f"asks: {{kind: {words}}}"
    for words in ("shift", "shift, place: content", "shift, place: both", "mask", "query")
)
CATEGORICAL, ERROR, MIXTURE = (
    f"density: {{kind: {words}}}"
    for words in ("categorical", "squared_error", "gaussian_mixture, num_components: 3")
)
DIFFUSION = "density: {kind: diffusion, noise_a: 1, sampling_steps: 4}"
FRAMES, SPEECH = "reads: {kind: frames}", ("data={train: shards, frames: [12, 5]}",)
CONTEXT = "schedule: {kind: context, mask_ratio: 0.5}"
PLACE = "density: {kind: place}"
INSTRUCT = "asks: {kind: instruct}"
ITSELF = "asks: {kind: in_context}"
BRIDGE = "asks: {kind: visible, decoder: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}}"
CLASSES = "condition: {kind: labels, num_classes: 3}"
FEATURES = "condition: {kind: pooled_features, feature_size: 4, tokenizer: VQGAN}"
ADAPTER = "transform: {kind: adapter, blocks: 2}"
MEMORY = "memory: {kind: encoded_image, num_layers: 2, patch_size: 8}"


def config(objective):
    return tiny(objective, model={**VIT, "norm_epsilon": 1e-5})
