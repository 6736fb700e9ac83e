"""Count the floating-point operations of a model, for throughput metrics.

Convention: a multiply-add counts as two; only matrix products and attention count, not element-wise
operations and embedding lookups; causal attention counts the visible half; the backward pass counts
twice the forward pass; recomputation is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavis.config.schema import ModelConfig

# Dense bf16 peak of one device in FLOP/s, without sparsity, from the vendor's data sheets.
_PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


@dataclass(frozen=True)
class Workload:
    """Token counts of one image in a stack.

    Attributes:
        num_tokens: tokens that pass through the blocks.
        num_visible: tokens with keys and values.
        mean_visible: average number of keys per query, including masked ones that kernels compute.
        num_read: tokens that the head reads; only these leave the last block.
        num_outputs: outputs of the head for each of them.
        num_memory: encoder tokens to which all others attend; the encoder's own work is not
            included.
    """

    num_tokens: int
    num_visible: int
    mean_visible: float
    num_read: int
    num_outputs: int
    num_memory: int = 0

    @classmethod
    def of_one_stream(cls, num_tokens: int, num_outputs: int, *, causal: bool) -> Workload:
        """Return the workload of causal or full attention over all tokens."""
        visible = (num_tokens + 1) / 2 if causal else float(num_tokens)
        return cls(num_tokens, num_tokens, visible, num_tokens, num_outputs)


def training_flops(model: ModelConfig, work: Workload) -> float:
    """Return the FLOPs of one image's forward and backward pass."""
    return 3 * forward_flops(model, work)


def forward_flops(model: ModelConfig, work: Workload) -> float:
    """Return the FLOPs of one image's forward pass through a stack and the head above it."""
    width = model.hidden_size

    def block(num_tokens: int) -> float:
        own = 2 * width * width + 2 * width * model.mlp_size + 2 * width * work.mean_visible
        if work.num_memory:
            own += 2 * width * width + 2 * width * work.num_memory
        return 2 * (num_tokens * own + (work.num_visible + work.num_memory) * 2 * width * width)

    head = 2 * work.num_read * width * work.num_outputs
    return (model.num_layers - 1) * block(work.num_tokens) + block(work.num_read) + head


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense bf16 peak in FLOP/s, or None if unknown."""
    matches = [name for name in _PEAKS if name in device_name]
    return _PEAKS[max(matches, key=len)] if matches else None
