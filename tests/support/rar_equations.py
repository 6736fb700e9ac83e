"""The generator of RAR's released code, from its equations, and its weights under our names.

No package ships it, so it is written here in plain torch, for whole sequences.
"""

import math

import torch
import torch.nn.functional as F

from megavis.model.attention import join_heads

WIDTH, HEADS, LAYERS, CLASSES, IDS, TOKENS = 32, 4, 3, 5, 12, 16


def released():
    """Return random tensors under the names of the released code."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return 0.3 * torch.randn(*shape, generator=generator)

    def linear(name, inputs, outputs):
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    shapes = {
        "cls_token": (WIDTH,),
        "embeddings": (IDS + 1 + CLASSES + 1, WIDTH),
        "pos_embed": (TOKENS + 2, WIDTH),
        "target_aware_pos_embed": (TOKENS + 2, WIDTH),
        "timesteps_embeddings": (TOKENS + 2, WIDTH),
        **linear("adaln_before_head.adaLN_modulation.1", WIDTH, 2 * WIDTH),
        **linear("lm_head", WIDTH, IDS),
    }
    for i in range(LAYERS):
        block, size = f"blocks.{i}", WIDTH // HEADS
        norms = {"norm1": WIDTH, "norm2": WIDTH, "attn.q_norm": size, "attn.k_norm": size}
        for name, width in norms.items():
            shapes |= {f"{block}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        shapes |= linear(f"{block}.attn.qkv", WIDTH, 3 * WIDTH)
        shapes |= linear(f"{block}.attn.proj", WIDTH, WIDTH)
        shapes |= linear(f"{block}.mlp.fc1", WIDTH, 4 * WIDTH)
        shapes |= linear(f"{block}.mlp.fc2", 4 * WIDTH, WIDTH)
        shapes |= linear(f"{block}.adaLN_modulation.1", WIDTH, 6 * WIDTH)
    return {name: random(*shape) for name, shape in shapes.items()}


def mapped(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def normed(tensors, name, x):
    given = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], *given, 1e-6)


def attended(tensors, block, x):
    """Return causal attention of the rows `[m, h]` of one image."""
    stacked = mapped(tensors, f"{block}.attn.qkv", x).unflatten(-1, (3, HEADS, -1))
    query, key, value = stacked.permute(1, 2, 0, 3)
    query = normed(tensors, f"{block}.attn.q_norm", query)
    key = normed(tensors, f"{block}.attn.k_norm", key)
    scores = query @ key.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
    for row in range(len(x)):
        scores[:, row, row + 1 :] = -math.inf
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    return mapped(tensors, f"{block}.attn.proj", mixed)


def generator_logits(tensors, ids, label, order):
    """Return logits `[len(ids) + 1, v]` of the next id of one image.

    Args:
        ids: in the order of generation.
        label: the class; None for no class.
        order: the place of each id.
    """
    row = IDS + 1 + (CLASSES if label is None else label)
    condition = tensors["embeddings"][row]
    rows = [tensors["cls_token"], condition, *(tensors["embeddings"][i] for i in ids)]
    places = [0, 1, *(2 + place for place in order)]
    x = torch.stack([r + tensors["pos_embed"][p] for r, p in zip(rows, places, strict=False)])
    for number, place in zip(range(1, len(rows)), order, strict=False):
        x[number] += tensors["target_aware_pos_embed"][2 + place]
    vectors = condition + tensors["timesteps_embeddings"][: len(rows)]
    for i in range(LAYERS):
        block = f"blocks.{i}"
        parts = mapped(tensors, f"{block}.adaLN_modulation.1", F.silu(vectors)).chunk(6, -1)
        y = normed(tensors, f"{block}.norm1", x) * (1 + parts[1]) + parts[0]
        x = x + parts[2] * attended(tensors, block, y)
        y = normed(tensors, f"{block}.norm2", x) * (1 + parts[4]) + parts[3]
        y = mapped(tensors, f"{block}.mlp.fc2", F.gelu(mapped(tensors, f"{block}.mlp.fc1", y)))
        x = x + parts[5] * y
    name = "adaln_before_head.adaLN_modulation.1"
    scale, shift = mapped(tensors, name, F.silu(vectors)).chunk(2, -1)
    x = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
    return mapped(tensors, "lm_head", x)[1:]


def ours(tensors):
    """Return the same weights under our names, for norms before the head without gain and bias.

    What the released code adds to the class as a token is part of the class's vector here, and
    taken away from the vectors of rows.
    """
    first = tensors["pos_embed"][1]
    named = {
        "embedding.content.weight": tensors["embeddings"][:IDS],
        "embedding.start.weight": tensors["embeddings"][IDS + 1 :] + first,
        "embedding.sink": tensors["cls_token"] + tensors["pos_embed"][0],
        "embedding.row_vectors": tensors["timesteps_embeddings"][: TOKENS + 1] - first,
        "embedding.positions.weight": tensors["pos_embed"][2:],
        "embedding.asked_positions.weight": tensors["target_aware_pos_embed"][2:],
        "head.norm.weight": torch.ones(WIDTH),
        "head.norm.bias": torch.zeros(WIDTH),
        "head.linear.weight": tensors["lm_head.weight"],
        "head.linear.bias": tensors["lm_head.bias"],
    }
    for kind in ("weight", "bias"):
        scale, shift = tensors[f"adaln_before_head.adaLN_modulation.1.{kind}"].chunk(2)
        named[f"head.modulation.linear.{kind}"] = torch.cat([shift, scale])
    names = {
        "input_layernorm": "norm1",
        "pre_mlp_layernorm": "norm2",
        "self_attention.query_norm": "attn.q_norm",
        "self_attention.key_norm": "attn.k_norm",
        "self_attention.linear_proj": "attn.proj",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
        "modulation.linear": "adaLN_modulation.1",
    }
    for i in range(LAYERS):
        for kind in ("weight", "bias"):
            for own, theirs in names.items():
                named[f"blocks.{i}.{own}.{kind}"] = tensors[f"blocks.{i}.{theirs}.{kind}"]
            joined = join_heads(*tensors[f"blocks.{i}.attn.qkv.{kind}"].chunk(3), HEADS)
            named[f"blocks.{i}.self_attention.linear_qkv.{kind}"] = joined
    return named
