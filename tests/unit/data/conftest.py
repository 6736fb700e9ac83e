"""A small shard folder."""

from __future__ import annotations

import numpy as np
import pytest
from shard_folder import write_folder


@pytest.fixture
def folder(tmp_path):
    """37 samples of 16 tokens in four shards, the last one partial."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 512, (37, 16)).astype(np.uint16)
    labels = random.integers(-1, 3, 37)
    path = tmp_path / "shards"
    write_folder(path, tokens=tokens, labels=labels, class_names=["a", "b", "c"])
    return path, tokens, labels
