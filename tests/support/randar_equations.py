"""The generator of RandAR's released code, from its equations, under its names.

No package ships it, so it is written here in plain torch, row by row and for whole sequences.
"""

import cmath

import torch

WIDTH, HEAD, LAYERS, CLASSES, IDS, SIDE, INNER = 128, 64, 2, 5, 12, 4, 96


def shapes(width, layers, inner, *, ids, classes):
    """Return the shapes of a released generator's tensors by name."""
    found = {
        "tok_embeddings.weight": (ids, width),
        "cls_embedding.embedding_table.weight": (classes + 1, width),
        "pos_instruct_embeddings": (1, width),
        "norm.weight": (width,),
        "output.weight": (ids, width),
    }
    for i in range(layers):
        found |= {
            f"layers.{i}.attention_norm.weight": (width,),
            f"layers.{i}.attention.wqkv.weight": (3 * width, width),
            f"layers.{i}.attention.wo.weight": (width, width),
            f"layers.{i}.ffn_norm.weight": (width,),
            f"layers.{i}.feed_forward.w1.weight": (inner, width),
            f"layers.{i}.feed_forward.w3.weight": (inner, width),
            f"layers.{i}.feed_forward.w2.weight": (width, inner),
        }
    return found


def released():
    """Return random tensors under the names of the released code."""
    generator = torch.Generator().manual_seed(2)
    scale = {1: 1.0, 2: WIDTH**-0.5}
    return {
        name: scale[len(shape)] * 2 * torch.randn(*shape, generator=generator)
        for name, shape in shapes(WIDTH, LAYERS, INNER, ids=IDS, classes=CLASSES).items()
    }


def normed(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(vector, place):
    """Rotate each head of `[h]`: half of its channels by the row of a place, half by its column.

    The class, at place None, has rotations of length 0.
    """
    result = torch.zeros_like(vector)
    if place is None:
        return result
    half = HEAD // 2
    for channel in range(0, len(vector), 2):
        within = channel % HEAD
        coordinate = place // SIDE if within < half else place % SIDE
        turn = cmath.exp(1j * coordinate / 10_000 ** (within % half / half))
        pair = complex(vector[channel], vector[channel + 1]) * turn
        result[channel], result[channel + 1] = pair.real, pair.imag
    return result


def generator_logits(tensors, ids, label, order):
    """Return logits `[len(order), v]` of the ids of one image at the places of an order.

    Args:
        ids: in the order of generation.
        label: the class; None for no class.
        order: the place of each id.
    """
    instruction = tensors["pos_instruct_embeddings"][0]
    rows = [tensors["cls_embedding.embedding_table.weight"][CLASSES if label is None else label]]
    places = [None]
    for token, place in zip(ids, order, strict=True):
        rows += [turned(instruction, place), tensors["tok_embeddings.weight"][token]]
        places += [place, place]
    x = torch.stack(rows)
    for i in range(LAYERS):
        weights = {
            name.removeprefix(f"layers.{i}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"layers.{i}.")
        }
        y = normed(x, weights["attention_norm.weight"]) @ weights["attention.wqkv.weight"].T
        query, key, value = y.chunk(3, -1)
        query = torch.stack([turned(row, p) for row, p in zip(query, places, strict=True)])
        key = torch.stack([turned(row, p) for row, p in zip(key, places, strict=True)])
        mixed = torch.zeros_like(x)
        for head in range(0, WIDTH, HEAD):
            own = slice(head, head + HEAD)
            for row in range(len(x)):
                scores = key[: row + 1, own] @ query[row, own] / HEAD**0.5
                mixed[row, own] = scores.softmax(0) @ value[: row + 1, own]
        x = x + mixed @ weights["attention.wo.weight"].T
        y = normed(x, weights["ffn_norm.weight"])
        gate = y @ weights["feed_forward.w1.weight"].T
        y = gate * gate.sigmoid() * (y @ weights["feed_forward.w3.weight"].T)
        x = x + y @ weights["feed_forward.w2.weight"].T
    logits = normed(x, tensors["norm.weight"]) @ tensors["output.weight"].T
    return logits[1::2]
