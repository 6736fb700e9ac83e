"""Count the floating-point operations of a model, for throughput metrics.

Convention: a multiply-add counts as two; only matrix products and attention count, not element-wise
operations and embedding lookups; causal attention counts the visible half; the backward pass counts
twice the forward pass; recomputation is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megavis.config.schema import ModelConfig
from megavis.model.modulation import OF_BLOCK, OF_NORM


@dataclass(frozen=True)
class Peak:
    """Dense peak of one device in TFLOP/s, without sparsity.

    Attributes:
        bf16: peak in bf16, which is fp16's too.
        fp8: None if the device has no FP8.
    """

    bf16: float
    fp8: float | None = None


PEAKS: Mapping[str, Peak] = {
    "A100": Peak(312),
    "H100 PCIe": Peak(756, fp8=1513),
    "H100 NVL": Peak(835, fp8=1671),
    "H100": Peak(989, fp8=1979),
    "H200 NVL": Peak(835, fp8=1671),
    "H200": Peak(989, fp8=1979),
    "B200": Peak(2250, fp8=4500),
    "GB200": Peak(2500, fp8=5000),
}
"""Peaks by a part of the name that the driver reports, from the vendor's data sheets."""


@dataclass(frozen=True)
class Workload:
    """Token counts of one image in a stack.

    Attributes:
        num_tokens: tokens that pass through the blocks.
        num_visible: tokens with keys and values.
        mean_visible: average number of keys per query, including masked ones that kernels compute.
        num_read: tokens that the head reads; only these leave the last block.
        num_last: tokens for which the last block computes an output; 0: those that are read.
        num_outputs: outputs of the head for each of them.
        num_memory: encoder tokens to which all others attend; the encoder's own work is not
            included.
        is_modulated: whether a condition's vector of each token modulates norms and branches.
    """

    num_tokens: int
    num_visible: int
    mean_visible: float
    num_read: int
    num_outputs: int
    num_memory: int = 0
    is_modulated: bool = False
    num_last: int = 0

    @property
    def num_last_queries(self) -> int:
        """Tokens for which the last block computes an output."""
        return self.num_last or self.num_read

    @classmethod
    def of_one_stream(cls, num_tokens: int, num_outputs: int, *, causal: bool) -> Workload:
        """Return the workload of causal or full attention over all tokens."""
        visible = (num_tokens + 1) / 2 if causal else float(num_tokens)
        return cls(num_tokens, num_tokens, visible, num_tokens, num_outputs)


def forward_flops(model: ModelConfig, work: Workload) -> float:
    """Return the FLOPs of one image's forward pass through a stack and the head above it."""
    width = model.hidden_size
    visible = work.mean_visible + work.num_memory
    attention = 4 * width * visible * _queries(model, work)
    head = 2 * work.num_read * width * work.num_outputs
    return matrix_flops(model, work) + modulation_flops(model, work) + attention + head


def modulation_flops(model: ModelConfig, work: Workload) -> float:
    """Return the part of `forward_flops` in maps from a condition to what it modulates."""
    if not work.is_modulated:
        return 0.0
    vectors = OF_BLOCK * model.num_layers * work.num_tokens + OF_NORM * work.num_read
    return 2.0 * model.hidden_size**2 * vectors


def matrix_flops(model: ModelConfig, work: Workload) -> float:
    """Return the part of `forward_flops` in products of the blocks with their weights."""
    width = model.hidden_size
    # Query and output projection, of cross-attention too, and the MLP; then keys and values.
    own = width * (2 * width * (1 + (work.num_memory > 0)) + model.mlp_input_size + model.mlp_size)
    keys = 2 * width * width * (work.num_visible + work.num_memory)
    return 2 * (own * _queries(model, work) + keys * model.num_layers)


def fp8_flops(model: ModelConfig, work: Workload) -> float:
    """Return the part of `matrix_flops` that can run in FP8.

    Queries, keys and values of cross-attention are excluded: they multiply parts of a weight.
    """
    crossed = 0.0
    if work.num_memory:
        tokens = _queries(model, work) + 2 * work.num_memory * model.num_layers
        crossed = 2 * model.hidden_size**2 * tokens
    return matrix_flops(model, work) - crossed


def _queries(model: ModelConfig, work: Workload) -> int:
    """Return the tokens for which blocks compute an output, summed over the blocks."""
    return (model.num_layers - 1) * work.num_tokens + work.num_last_queries


def peak_flops(device_name: str, precision: str, fp8_share: float = 0.0) -> float | None:
    """Return a device's dense peak in FLOP/s, or None if unknown, as it is for float32.

    Args:
        device_name: as the driver reports it.
        precision: `training.precision`.
        fp8_share: fraction of the operations in FP8; the others are in bf16 or fp16.
    """
    matches = [name for name in PEAKS if name in device_name]
    if precision == "float32" or not matches:
        return None
    # Take the longest match: "H100" is also a part of "H100 PCIe".
    peak = PEAKS[max(matches, key=len)]
    plain = 1e12 * peak.bf16
    if not fp8_share:
        return plain
    return None if peak.fp8 is None else mixed_peak(plain, 1e12 * peak.fp8, fp8_share)


def mixed_peak(plain: float, fp8: float, fp8_share: float) -> float:
    """Return the peak rate if `fp8_share` of the operations run at `fp8`, the rest at `plain`."""
    return 1 / (fp8_share / fp8 + (1 - fp8_share) / plain)
