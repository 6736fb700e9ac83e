"""Training in worker processes with gradient buckets of another size."""

import pytest

from megavis.config.load import load_config
from megavis.parallel.launch import Launch
from megavis.training import deepspeed_config
from megavis.training.parity import Curve, train_briefly


def train_with_buckets(launch: Launch, path: str, words: list[str], elements: int) -> Curve:
    """Train for three steps as `train_briefly` does, in buckets of this many gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_config, "bucket_size", lambda *_: elements)
        return train_briefly(launch, load_config(path, words).config, 3, device="cpu")
