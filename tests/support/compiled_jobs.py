"""Training with compiled blocks in worker processes."""

import torch

from megavis.config.schema import RunConfig
from megavis.model import compiled_blocks
from megavis.model.compiled_blocks import Compilation, take_compilation
from megavis.parallel.launch import Launch
from megavis.training.parity import Curve, train_briefly


def compiled_curve(
    launch: Launch, config: RunConfig, steps: int, backend: str
) -> tuple[Curve, Compilation]:
    """Train for some steps with compiled blocks; return the curve, and what compiling took."""
    training = config.training.model_copy(update={"kernels": "blocks"})
    before = compiled_blocks.BACKEND
    compiled_blocks.BACKEND = {"backend": backend}
    torch._dynamo.reset()
    take_compilation()
    try:
        compiled = config.model_copy(update={"training": training})
        return train_briefly(launch, compiled, steps, "cpu"), take_compilation()
    finally:
        compiled_blocks.BACKEND = before
        torch._dynamo.reset()
