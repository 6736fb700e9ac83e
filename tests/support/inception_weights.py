"""Random weights for the Inception network, the same for all versions of numpy and torch."""

import zlib

import numpy as np
import torch

from megavis.evaluation.images.feature_networks import Inception


def random_weights():
    """Return tensors by torch-fidelity's names, scaled so that features neither vanish nor grow."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Inception().state_dict().items()}
    return {name: _fill(name, shape) for name, shape in shapes.items()}


def _fill(name, shape):
    if name.endswith("num_batches_tracked"):
        return torch.tensor(0)
    # numpy guarantees the stream of RandomState.
    draws = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) > 1:
        draws *= (2.0 / np.prod(shape[1:])) ** 0.5
    elif name.endswith("running_var"):
        draws = 1.0 + 0.1 * np.abs(draws)
    else:
        draws = 0.1 * draws + name.endswith("bn.weight")
    return torch.from_numpy(draws.astype(np.float32))


def random_images(count, size, *, seed=0):
    """Return images uint8 `[count, size, size, 3]`, waves plus noise."""
    random = np.random.RandomState(seed)
    waves = random.uniform(-3, 3, (count, 3, 3))
    rows, columns = np.meshgrid(*[np.arange(size) / size] * 2, indexing="ij")
    grid = np.stack([rows, columns, np.ones_like(rows)], -1)
    pixels = 127.5 + 100 * np.sin(4 * np.einsum("hwk,bck->bhwc", grid, waves))
    noise = random.uniform(-20, 20, (count, size, size, 3))
    return torch.from_numpy((pixels + noise).clip(0, 255).astype(np.uint8))


def random_features():
    """Return overlapping features float32 `[230, 24]` and `[170, 24]`, and logits `[230, 9]`."""
    random = np.random.RandomState(7)
    mixing = random.standard_normal((24, 24)) / 5
    first = random.standard_normal((230, 24)) @ mixing
    second = random.standard_normal((170, 24)) @ (mixing + 0.05 * np.eye(24)) + 0.1
    logits = 2.0 * random.standard_normal((230, 9))
    return [torch.from_numpy(part.astype(np.float32)) for part in (first, second, logits)]
