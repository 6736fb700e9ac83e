"""Select the kernels of a block by device and `training.kernels`.

| operation | plain, and always on a CPU | on a GPU with `training.kernels: regions` |
|---|---|---|
| attention: causal, full, context | SDPA with a flag | the same: cuDNN or flash attention |
| attention of two streams | SDPA with a dense mask | FlexAttention, without a dense mask |
| attention to at most four keys | sums over the keys, in float32 | `torch.compile` |
| norm | in float32, rounded once | torch's kernel, float32 inside |
| bias of a matrix product | separate addition | fused (`tensor_parallel.py`) |
| rotary positions, activation, dropout and residual | one kernel per operator | `torch.compile` |
| cross-entropy | a piece at a time in float32 | `torch.compile`, without float32 logits |

`training.kernels: torch` uses the plain form on a GPU too; `apex` uses the norms and Adam of NVIDIA
Apex, and `transformer_engine` the linear layers and norms of Transformer Engine in the blocks
(`tensor_parallel.py`); both otherwise equal `regions`. `blocks` compiles whole blocks in training
(`compiled_blocks.py`), on a CPU too, and otherwise equals `regions`; `auto` is `blocks` on a GPU. A
compiled region is a function of tensors only.

Legend: b images, n heads of this process, q queries, c keys, d head size, s tokens, h hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megavis.config.errors import UserError
from megavis.config.section import KernelLibrary

# torch's default.
BLOCK = 128
"""Block size of FlexAttention, in queries and in keys."""
FEW = 4
"""Most keys of `attend_to_few`."""
# Inductor's FlexAttention template rejects smaller heads.
_SMALLEST_HEAD = 16
# The float32 temporaries of an eighth take 1.5 bytes a logit, less than a gradient in bf16.
NUM_PIECES = 8
"""Pieces in which the plain form computes functions of `in_pieces`."""


def choose_kernels(library: KernelLibrary) -> None:
    """Set the kernels of this process for GPUs; on a CPU the plain forms are always used.

    Raises:
        UserError: the library is not installed.
    """
    if library == "apex":
        _apex_norms()
    if library == "transformer_engine":
        _require_transformer_engine()
    _Setting.library = library


def chosen_kernels() -> KernelLibrary:
    """Return the library of `choose_kernels`."""
    return _Setting.library


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Use torch's own kernels in this context, as on a CPU."""
    before = _Setting.library
    _Setting.library = "torch"
    try:
        yield
    finally:
        _Setting.library = before


class _Setting:
    """The process-wide setting of `choose_kernels`, like those in `torch.backends`."""

    library: KernelLibrary = "auto"


def is_fused(tensor: Tensor) -> bool:
    """Return whether operations on this tensor use fused kernels instead of the plain form.

    They do inside a compiled block too, since the compiler fuses those forms best.
    """
    return torch.compiler.is_compiling() or (tensor.is_cuda and _Setting.library != "torch")


def compiles_blocks(device: torch.device) -> bool:
    """Return whether blocks in training are compiled whole on this device."""
    library = _Setting.library
    return library == "blocks" or (library == "auto" and device.type == "cuda")


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function compiled with `torch.compile`, once per process."""
    return torch.compile(function)


def region(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a function to run compiled if `is_fused` holds for its first argument."""

    @functools.wraps(plain)
    def run(first: Tensor, *rest: Any) -> Tensor:
        # Inside a compiled block this is part of the block's graph.
        apart = is_fused(first) and not torch.compiler.is_compiling()
        return (compiled(plain) if apart else plain)(first, *rest)

    return run


def in_pieces(plain: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Decorate a function of logits and ids to save no more than these for the backward pass.

    It runs compiled if `is_fused` holds for the logits, otherwise in pieces of rows, which the
    backward pass computes again. Rows (first dimension) must be independent.
    """

    @functools.wraps(plain)
    def run(logits: Tensor, ids: Tensor) -> Tensor:
        if is_fused(logits):
            return compiled(plain)(logits, ids)
        result: Tensor = _InPieces.apply(plain, logits, ids)
        return result

    return run


class _InPieces(torch.autograd.Function):
    """A function in pieces of rows, whose temporaries exist for one piece at a time."""

    @staticmethod
    def forward(ctx: Any, plain: Callable[..., Tensor], logits: Tensor, ids: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(logits, ids)
        return torch.cat([plain(*piece) for piece in _pieces(logits, ids)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        logits, ids = ctx.saved_tensors
        result = torch.empty_like(logits)
        for piece, of_piece, slope, own_ids in _pieces(logits, result, gradient, ids):
            with torch.enable_grad():
                leaf = piece.detach().requires_grad_()
                value = ctx.plain(leaf, own_ids)
            of_piece.copy_(torch.autograd.grad(value, leaf, slope)[0])
        return None, result, None


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = -(-len(tensors[0]) // NUM_PIECES)
    return zip(*(each.split(rows) for each in tensors), strict=True)


@region
def apply_rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent channels (2i, 2i + 1), as complex numbers, by an angle, in float32.

    Args:
        heads: `[b, n, s, d]`.
        cos: cosines of the angles, float32 `[b or 1, 1, s, d / 2]`.
        sin: sines of the angles, float32 `[b or 1, 1, s, d / 2]`.

    Returns:
        A tensor with the shape and dtype of `heads`.
    """
    # Splitting pairs costs nothing: on an H100 a step of DARL takes as long with adjacent channels
    # swapped in place (docs/performance.md).
    real, imaginary = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(-2).to(heads.dtype)


@region
def attend_to_few(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return softmax(q · k / √d) · v, key by key, in float32.

    Flash attention pads each sequence to a block of 128 queries in its backward pass, which is many
    times the memory of a pair of tokens, and batches of matrix products are slow for so few keys.

    Args:
        query: `[b, n, q, d]`.
        key: `[b, n, c, d]`.
        value: `[b, n, c, d]`.

    Returns:
        `[b, n, q, d]` in the dtype of `query`.
    """
    wide, scale = query.float(), query.shape[3] ** -0.5
    keys, values = key.float().split(1, dim=2), value.float().split(1, dim=2)
    # Scale the scores, so that only a view of the projection is saved for queries.
    scores = torch.stack([(wide * each).sum(-1) for each in keys], dim=-1) * scale
    weights = scores.softmax(-1).split(1, dim=-1)
    mixed = weights[0] * values[0]
    for weight, each in zip(weights[1:], values[1:], strict=True):
        mixed = mixed + weight * each
    return mixed.to(query.dtype)


@in_pieces
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, float32 `[s, b]`, of logits `[s, b, v]` and ids int64 `[s, b]`."""
    wide = logits.float().flatten(0, 1)
    return F.cross_entropy(wide, targets.flatten(), reduction="none").view_as(targets)


@in_pieces
def vocabulary_terms(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the terms of the cross-entropy for one part of the vocabulary.

    Args:
        logits: logits of this part, `[s, b, v]`.
        ids: int64 `[s, b]`, counted from this part's first id; ids outside [0, v) are in others.

    Returns:
        log Σ exp(logits), and the logit of the id or 0, float32 `[s, b, 2]`.
    """
    wide = logits.float()
    # Compare rather than gather: ids of other parts of the vocabulary are out of range here.
    is_target = ids.unsqueeze(-1) == torch.arange(wide.shape[-1], device=wide.device)
    return torch.stack([wide.logsumexp(-1), torch.where(is_target, wide, 0.0).sum(-1)], dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / √(variance + eps) · weight + bias over the last dimension of x.

    "Layer Normalization" (Ba, Kiros, Hinton), equation 4. Computed in float32 and rounded once to
    the dtype of x.
    """
    if is_fused(x) and x.dtype == weight.dtype:
        if _Setting.library == "apex":
            normalise = _apex_norms().fused_layer_norm_affine
            # Apex has no affine layer norm without bias.
            added = torch.zeros_like(weight) if bias is None else bias
            normalised: Tensor = normalise(x, weight, added, weight.shape, eps)
            return normalised
        # torch's kernel computes in float32 for any dtype.
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    shift = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / √(mean x² + eps) · gain over the last dimension of x, in the dtype of x.

    "Root Mean Square Layer Normalization", equation 4.
    """
    if is_fused(x) and x.dtype == gain.dtype:
        if _Setting.library == "apex":
            normalised: Tensor = _apex_norms().fused_rms_norm_affine(x, gain, gain.shape, eps)
            return normalised
        return F.rms_norm(x, gain.shape, gain, eps)
    # Not `float()`: float64 must stay float64 for numerical gradients.
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, gain = x.to(dtype), gain.to(dtype)
    if x.is_cuda:
        return F.rms_norm(wide, gain.shape, gain, eps).to(x.dtype)
    result: Tensor = _RMSNorm.apply(wide, gain, eps)
    return result.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMS norm on a CPU, where torch has no kernel and autograd takes six times as long.

    With n = x / √(mean x² + eps) and g the output gradient times the gain, the gradient of x is
    (g - n · mean(g · n)) / √(mean x² + eps). Saves the same tensors as the CUDA kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        # One pass over x, without materializing its squares: on a CPU this is memory-bound.
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
    """Compute attention under a mask of `group_blocks`; fully masked queries get zeros.

    Args:
        query: `[b, n, q, d]`.
        key: `[b, n, c, d]`.
        value: `[b, n, c, d]`.
        block_mask: the mask.

    Returns:
        `[b, n, q, d]`.
    """
    # Inside a compiled block this is part of the block's graph.
    run: Callable[..., Any] = flex_attention
    if not torch.compiler.is_compiling():
        run = compiled(flex_attention)
    attended: Tensor = run(query, key, value, block_mask=block_mask)
    return attended


def suits_flex(
    like: Tensor, num_queries: int, head_size: int, dropout: float, *, training: bool
) -> bool:
    """Return whether to use FlexAttention: in training, no dropout, enough queries, wide heads.

    `like` is a tensor on the device.
    """
    # Do not test for gradients: they are disabled in the first pass of a checkpointed block.
    large = num_queries >= BLOCK and head_size >= _SMALLEST_HEAD
    return is_fused(like) and large and dropout == 0.0 and training


def decoding_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Disable cuDNN's attention inside the block on a GPU, since it replans for every length."""
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
    """Return the FlexAttention mask under which a query attends to keys of smaller groups.

    No dense mask is materialised: whether a pair of blocks is fully, partly or not visible follows
    from the smallest and largest group of each block.

    Args:
        groups: groups of the keys, int64 `[b or 1, c]`.
        reach: int64 `[b or 1, q]`; a query attends to keys whose group is smaller.
    """
    lowest, highest, filled_keys = _extremes(groups)
    least, most, filled_queries = _extremes(reach)
    # A partial block at the end of a sequence never counts as fully visible.
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
    """Return the smallest and largest group of each block `[b, blocks]`, and which are complete."""
    count = groups.shape[1]
    missing, most = -count % BLOCK, torch.iinfo(torch.int32).max
    # Each padding is the neutral element of its extreme.
    low = F.pad(groups, (0, missing), value=most).unflatten(1, (-1, BLOCK)).amin(-1)
    high = F.pad(groups, (0, missing), value=-1).unflatten(1, (-1, BLOCK)).amax(-1)
    is_filled = torch.arange(low.shape[1], device=low.device) < count // BLOCK
    return low, high, is_filled


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return counts `[b, 1, i]` and indices, true ones first, `[b, 1, i, j]` of `[b, i, j]`."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1)[:, None].int(), order[:, None].int()


def apex_part(module: str, name: str) -> Any:
    """Import `name` from `apex.module` of NVIDIA Apex, which is needed only if it is selected.

    Raises:
        UserError: NVIDIA Apex is not installed.
    """
    # Import the exact submodule, since apex on PyPI is an unrelated web toolkit.
    try:
        return getattr(importlib.import_module(f"apex.{module}"), name)
    except (ImportError, AttributeError):
        text = "apex needs NVIDIA Apex, which is not installed; use auto, or install Apex from"
        raise UserError(f"{text} NVIDIA's sources", key="training.kernels") from None


def _apex_norms() -> Any:
    return apex_part("normalization", "fused_layer_norm")


def _require_transformer_engine() -> None:
    try:
        engine = importlib.import_module("transformer_engine.pytorch")
    # A missing extension library raises FileNotFoundError.
    except (ImportError, OSError):
        raise UserError(
            "transformer_engine needs NVIDIA Transformer Engine for torch, which is not installed;"
            " use auto, or install transformer_engine[pytorch]",
            key="training.kernels",
        ) from None
    if not hasattr(engine, "autocast"):
        text = "needs Transformer Engine 2.9 or newer; use auto, or upgrade it"
        raise UserError(text, key="training.kernels")
