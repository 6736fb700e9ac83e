"""Reference implementation of iGPT in plain loops over images and heads."""

import math

import torch


def rms_norm(x, gain, epsilon):
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gain


def attend(x, weights, num_heads, sees):
    """Attend `[n, h]` head by head and query by query; `sees(i, j)` is the mask."""
    num_tokens, width = x.shape
    size = width // num_heads
    mixed = torch.zeros_like(x)
    for head in range(num_heads):
        # A head's queries are followed by its keys, and these by its values.
        rows = weights["linear_qkv.weight"][3 * head * size : 3 * (head + 1) * size]
        query, key, value = (x @ part.T for part in rows.split(size))
        for i in range(num_tokens):
            visible = [j for j in range(num_tokens) if sees(i, j)]
            scores = torch.stack([query[i] @ key[j] / math.sqrt(size) for j in visible])
            share = scores.softmax(0)
            mixed[i, head * size : (head + 1) * size] = sum(
                p * value[j] for p, j in zip(share, visible, strict=True)
            )
    return mixed @ weights["linear_proj.weight"].T


def logits(parameters, ids, *, num_layers, num_heads, causal, mask=None, epsilon=1e-5):
    """Return logits `[n, v]` for an image's ids `[n]`; `mask` zeroes embeddings, as in BERT."""

    def part(prefix):
        return {k.removeprefix(prefix): v for k, v in parameters.items() if k.startswith(prefix)}

    embedded = parameters["embedding.content.weight"][ids]
    if causal:
        embedded = torch.cat([parameters["embedding.start"][None], embedded[:-1]])
    if mask is not None:
        embedded = torch.where(mask[:, None], embedded.new_zeros(()), embedded)
    x = embedded + parameters["embedding.positions.weight"]
    for layer in range(num_layers):
        weights = part(f"blocks.{layer}.")
        inner = rms_norm(x, weights["input_layernorm.weight"], epsilon)
        own = {k.removeprefix("self_attention."): v for k, v in weights.items()}
        x = x + attend(inner, own, num_heads, lambda i, j: j <= i or not causal)
        inner = rms_norm(x, weights["pre_mlp_layernorm.weight"], epsilon)
        hidden = inner @ weights["mlp.linear_fc1.weight"].T
        x = x + (hidden / (1 + (-1.702 * hidden).exp())) @ weights["mlp.linear_fc2.weight"].T
    return rms_norm(x, parameters["head.norm.weight"], epsilon) @ parameters["head.linear.weight"].T
