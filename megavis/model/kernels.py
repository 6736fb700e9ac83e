"""Kernels: the one place that chooses how a block's work between matrix products is computed.

| work | plain, and on a CPU | on a GPU, `training.kernels: auto` |
|---|---|---|
| attention: causal, full, context | SDPA by a flag | the same: cuDNN's or flash attention |
| attention of two streams | SDPA under a dense mask | FlexAttention, which writes no mask |
| norm | in float32, rounded once | torch's kernel, which is float32 inside |
| bias of a matrix product | added apart | in the product (`linear.py`) |
| rotary positions, activation, dropout and residual | operator by operator | compiled by torch |
| cross-entropy | of float32 logits | compiled: no float32 logits are written |

`training.kernels: torch` computes the plain form on a GPU too; `apex` takes the norms and Adam of
NVIDIA Apex, and all else as `auto`. A compiled region is a function of tensors alone: what is
around it (ZeRO's hooks, recomputation, collectives) stays out of the graph.

Legend: b images, n heads of this process, q queries, c keys, d head size, s tokens, h hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megavis.config.choices import KernelLibrary
from megavis.config.errors import UserError

BLOCK = 128
"""Queries and keys that FlexAttention looks at together."""
_SMALLEST_HEAD = 16


class _Setting:
    """What `choose_kernels` chose for this process, as `torch.backends` holds torch's own."""

    library: KernelLibrary = "auto"


def choose_kernels(library: KernelLibrary) -> None:
    """Choose the kernels of this process for GPUs; a CPU always computes the plain forms.

    Raises:
        UserError: the library is not installed.
    """
    if library == "apex":
        _apex_norms()
    _Setting.library = library


def is_fused(tensor: Tensor) -> bool:
    """Return whether work on this tensor leaves the plain form."""
    return tensor.is_cuda and _Setting.library != "torch"


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function compiled by torch, once a process."""
    return torch.compile(function)


def region(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that torch compiles where its first tensor is fused, and is plain else."""

    @functools.wraps(plain)
    def run(first: Tensor, *rest: Any) -> Tensor:
        return (compiled(plain) if is_fused(first) else plain)(first, *rest)

    return run


@region
def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring channels (2i, 2i + 1), a complex number, by an angle.

    Args:
        heads: `[b, n, s, d]`.
        cos: float32 `[b or 1, 1, s, d / 2]`, of the angles.
        sin: likewise.

    Returns:
        The shape and dtype of `heads`; computed in float32.
    """
    real, imaginary = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(-2).to(heads.dtype)


@region
def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log softmax(logits)[target]: float32 `[s, b]` of `[s, b, v]` and int64 `[s, b]`."""
    wide = logits.float().flatten(0, 1)
    return F.cross_entropy(wide, targets.flatten(), reduction="none").view_as(targets)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / √(variance + eps) · weight + bias over the last dimension of x.

    "Layer Normalization" (Ba, Kiros, Hinton), equation 4. The result has the dtype of x, and is
    rounded to it once.
    """
    if is_fused(x) and x.dtype == weight.dtype:
        if _Setting.library == "apex":
            normalise = _apex_norms().fused_layer_norm_affine
            added = torch.zeros_like(weight) if bias is None else bias
            normalised: Tensor = normalise(x, weight, added, weight.shape, eps)
            return normalised
        # In float32 inside, whatever the dtype.
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    shift = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / √(mean x² + eps) · gain over the last dimension of x, likewise.

    "Root Mean Square Layer Normalization", equation 4.
    """
    if is_fused(x) and x.dtype == gain.dtype:
        if _Setting.library == "apex":
            normalised: Tensor = _apex_norms().fused_rms_norm_affine(x, gain, gain.shape, eps)
            return normalised
        return F.rms_norm(x, gain.shape, gain, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, gain = x.to(dtype), gain.to(dtype)
    if x.is_cuda:
        return F.rms_norm(wide, gain.shape, gain, eps).to(x.dtype)
    result: Tensor = _RMSNorm.apply(wide, gain, eps)
    return result.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """The same where torch has no kernel: on a CPU autograd takes six times as long.

    It keeps what the kernel for CUDA keeps.

    With n = x / √(mean x² + eps) and g the gradient times the gain, x has the gradient
    (g - n · mean(g · n)) / √(mean x² + eps).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, inverse)
        return (x * inverse).mul_(gain)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, inverse = ctx.saved_tensors
        normalised = x * inverse
        of_gain = (gradient * normalised).flatten(0, -2).sum(0)
        scaled = gradient * gain
        along = torch.linalg.vecdot(scaled, normalised).unsqueeze(-1).div_(x.shape[-1])
        of_x = scaled.sub_(normalised.mul_(along)).mul_(inverse)
        return of_x, of_gain, None


def two_stream_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask
) -> Tensor:
    """Attend where a mask of `group_blocks` allows; a query that sees nothing gets zeros.

    Args:
        query: `[b, n, q, d]`.
        key: `[b, n, c, d]`.
        value: likewise.
        block_mask: who sees whom.

    Returns:
        `[b, n, q, d]`.
    """
    return compiled(flex_attention)(query, key, value, block_mask=block_mask)


def suits_flex(query: Tensor, dropout: float) -> bool:
    """Return whether FlexAttention takes these queries: in training, large enough, no dropout."""
    large = query.shape[2] >= BLOCK and query.shape[3] >= _SMALLEST_HEAD
    return is_fused(query) and large and dropout == 0.0 and torch.is_grad_enabled()


def decoding_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Leave cuDNN's attention out inside the block on a GPU: it would plan anew for each length."""
    if device.type != "cuda" or _Setting.library == "torch":
        return contextlib.nullcontext()
    kinds = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    chosen: contextlib.AbstractContextManager[None] = sdpa_kernel(kinds)
    return chosen


def group_blocks(groups: Tensor, reach: Tensor) -> BlockMask:
    """Return the mask of FlexAttention under which a query sees the keys of smaller groups.

    No number for each pair of tokens is written: which pairs of blocks see each other, whole or in
    part, follows from the smallest and largest group of each block.

    Args:
        groups: int64 `[b or 1, c]`, of the keys.
        reach: int64 `[b or 1, q]`; a query sees keys whose group is smaller.
    """
    lowest, highest, filled_keys = _extremes(groups)
    least, most, filled_queries = _extremes(reach)
    # A block that the end of a sequence cuts is never seen whole.
    whole = highest[:, None, :] < least[:, :, None]
    whole = whole & filled_keys & filled_queries[:, None]
    some = (lowest[:, None, :] < most[:, :, None]) & ~whole

    def sees(image: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        own = image if len(groups) > 1 else torch.zeros_like(image)
        return groups[own, column] < reach[own, row]

    return BlockMask.from_kv_blocks(
        *_listed(some),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(reach.shape[1], groups.shape[1]),
    )


def _extremes(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smallest and largest group of each block `[b, blocks]`, and which are filled."""
    count = groups.shape[1]
    missing, most = -count % BLOCK, torch.iinfo(torch.int32).max
    low = F.pad(groups, (0, missing), value=most).unflatten(1, (-1, BLOCK)).amin(-1)
    high = F.pad(groups, (0, missing), value=-1).unflatten(1, (-1, BLOCK)).amax(-1)
    is_filled = torch.arange(low.shape[1], device=low.device) < count // BLOCK
    return low, high, is_filled


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of `[b, i, j]` has, and these first: `[b, 1, i(, j)]`."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1)[:, None].int(), order[:, None].int()


def apex_part(module: str, name: str) -> Any:
    """Return `name` of `apex.module`: NVIDIA Apex is imported where it is chosen, and nowhere else.

    Raises:
        UserError: NVIDIA Apex is not installed.
    """
    # The exact submodule: the package that PyPI calls apex is an unrelated web toolkit.
    try:
        return getattr(importlib.import_module(f"apex.{module}"), name)
    except (ImportError, AttributeError):
        raise UserError(
            "training.kernels: apex needs NVIDIA Apex, which is not installed; use auto, or install"
            " Apex from NVIDIA's sources"
        ) from None


def _apex_norms() -> Any:
    return apex_part("normalization", "fused_layer_norm")
