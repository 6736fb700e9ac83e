"""Floating-point operations of this very architecture, for throughput figures.

Convention: a multiply and an add count as two; matrix products and attention count, element-wise
work and embedding look-ups do not; causal attention counts the half that is visible; the backward
pass counts twice the forward pass, and recomputation counts nothing.
"""

from __future__ import annotations

from megavis.config.schema import ModelConfig
from megavis.model.visibility import Kind

# Dense bf16 peak of one device in FLOP/s, without sparsity, from the vendor's data sheets.
_PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def training_flops(
    model: ModelConfig, *, num_tokens: int, num_outputs: int, visibility: Kind
) -> float:
    """Return the operations of one image's forward and backward pass.

    Args:
        model: sizes of the Transformer.
        num_tokens: tokens of an image.
        num_outputs: width of the head's output for each token.
        visibility: who sees whom.
    """
    width = model.hidden_size
    matrices = 4 * width * width + 2 * width * model.mlp_size
    visible = (num_tokens + 1) / 2 if visibility == "causal" else num_tokens
    attention = 2 * width * visible
    block = 2 * num_tokens * (matrices + attention)
    head = 2 * num_tokens * width * num_outputs
    return 3 * (model.num_layers * block + head)


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense bf16 peak in FLOP/s; None where it is not known."""
    matches = [name for name in _PEAKS if name in device_name]
    return _PEAKS[max(matches, key=len)] if matches else None
