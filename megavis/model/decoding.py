"""Decode one token at a time through the blocks of a causal model, bypassing their modules.

For single tokens of a small batch, calling modules takes longer than the matrix products. The
blocks' weights are therefore collected once, in the layout that the products need, and the KV cache
is one preallocated tensor. The computation follows Megatron's layer step by step, with constants
folded into the weights: a norm's gain and bias into the projection after it, the 1/√d of attention
into the query projection, and the 1.702 of iGPT's activation into the matrices around it.

On a GPU, steps are static (`static_step.py`): a CUDA graph saves host time, which exceeds device
time at small batch sizes.

Legend: b images, n heads of this process, d head size, h hidden size, t tokens so far, L blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megavis.model.activations import QUICK_GELU_FACTOR, quick_gelu
from megavis.model.attention import Attention, split_heads
from megavis.model.core import Block
from megavis.model.kernels import is_fused
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.norms import Norm
from megavis.model.positions import turns
from megavis.model.static_step import StaticStep
from megavis.model.visibility import KeyValueCache

REACH = 256
"""CUDA graphs are captured per this many tokens: a step sees a multiple of it, or all tokens."""


class IncrementalDecoder(KeyValueCache):
    """A KV cache, together with the blocks that extend it.

    Copies the current weights of a stack that `suits`, so create a new one for each batch of
    sequences. With `static` it runs static steps; the blocks must not be split over a tensor group.
    With `strict`, failing to capture a step as a CUDA graph on a GPU is an error.

    Attributes:
        is_static: whether its steps are static.
    """

    def __init__(
        self, blocks: Sequence[Block], capacity: int, *, static: bool = False, strict: bool = False
    ) -> None:
        super().__init__(capacity)
        self._strict = strict
        self.is_static, self._steps = static, dict[int, StaticStep]()
        self._blocks = [_Block.of(block) for block in blocks]
        self._places_of = {block.self_attention: i for i, block in enumerate(blocks)}
        self._carried_names = blocks[0].core.carried_names
        self._all: Tensor | None = None

    @staticmethod
    def suits(blocks: Sequence[Block]) -> bool:
        """Return True for a single causal stack of plain blocks, whose weights are present.

        Blocks with cross-attention, modulated norms, or norms of queries and keys do not suit. Nor
        do blocks under ZeRO-3, which gathers weights only while a module runs.
        """
        return bool(blocks) and all(
            block.core is blocks[0].core
            and block.core.visibility_kind == "causal"
            and not (block.core.has_memory or block.core.is_modulated)
            and not block.core.model.qk_norm
            and all(p.numel() for p in block.parameters())
            for block in blocks
        )

    def is_next(self, state: PackedState) -> bool:
        """Return True if `state` is a single token after the first, as `step` requires."""
        hidden = state if isinstance(state, Tensor) else state[0]
        return self.length > 0 and len(hidden) == 1

    def step(self, state: PackedState) -> PackedState:
        """Run all blocks on the next token, a state of `[1, b, h]`."""
        stream = LayerState.unpack(state, self._carried_names)
        # Copy, since blocks add to it in place.
        hidden, coordinates = stream.hidden[0].clone(), stream.carried.get("coordinates")
        turn = None if coordinates is None else self._blocks[0].turn(coordinates[:, 0])
        if self.is_static:
            hidden = self._static_step(hidden, turn)
        else:
            for block, (new, keys, values) in zip(self._blocks, self._places(), strict=True):
                block.run_(hidden, new.copy_, keys, values, turn)
        self._new = 1
        return stream.with_hidden(hidden[None]).pack()

    def _static_step(self, hidden: Tensor, turn: Tensor | None) -> Tensor:
        """Return the hidden states `[b, h]` after all blocks, by the step for this length."""
        assert self._all is not None
        reach = min(self.capacity, REACH * (self.length // REACH + 1))
        if reach not in self._steps:
            runs = [block.run_ for block in self._blocks]
            self._steps[reach] = StaticStep(
                runs, self._all, reach, hidden, turn, strict=self._strict
            )
        return self._steps[reach](hidden, turn, self.length)

    def _places(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield views of each block's cache: the new token's entry, and all up to it.

        Yields:
            The new entry `[2, b, n, d]`, transposed keys `[b · n, d, t]`, values `[b · n, t, d]`.
        """
        assert self._all is not None
        new = self._all.select(4, self.length).unbind()
        visible = self._all.flatten(2, 3).narrow(3, 0, self.length + 1)
        keys, values = visible[:, 0].transpose(2, 3).unbind(), visible[:, 1].unbind()
        return zip(new, keys, values, strict=True)

    def _room(self, module: nn.Module, like: Tensor) -> Tensor:
        if self._all is None:
            batch, heads, _, size = like.shape
            shape = (len(self._blocks), 2, batch, heads, self.capacity, size)
            # A static step multiplies even hidden entries by zero, so they must be finite.
            self._all = like.new_zeros(shape) if self.is_static else like.new_empty(shape)
        return self._all[self._places_of[module]]


class _Projection:
    """One of a block's four projections of single tokens, by `[out, in]` and `[out]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.t().contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[b, in]` to `[b, out]`."""
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    @classmethod
    def after_norm(
        cls,
        norm: Norm,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gain: float,
        factor: float = 1.0,
    ) -> _Projection:
        """Build from a projection times `factor`, with `gain` times its norm folded in."""
        # In float32, to round once rather than after each of gain, factor and weight.
        wide = weight.float() * factor
        bias = None if bias is None else bias.float() * factor
        if norm.bias is not None:
            shift = wide @ norm.bias.float()
            bias = shift if bias is None else bias + shift
        matrix = (wide * (norm.weight.float() * gain)).to(weight.dtype)
        return cls(matrix, None if bias is None else bias.to(weight.dtype))

    @classmethod
    def of_part(cls, linear: Any, group: dist.ProcessGroup, *, factor: float = 1.0) -> _Projection:
        """Build from a row-parallel layer, with its weight but not its bias scaled by `factor`.

        Only the first process has the bias, since `add_to_` sums over the group.
        """
        bias = linear.bias if group.rank() == 0 else None
        return cls(linear.weight * factor, bias)

    def add_to_(self, hidden: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        """Add the projection of `x` `[b, in]`, all-reduced, to hidden states `[b, out]`."""
        part = self(x)
        if group.size() > 1:
            dist.all_reduce(part, group=group)
        hidden.add_(part)


@dataclass(frozen=True)
class _Block:
    """A block as four projections and the operations between them."""

    query_key_value: _Projection
    """Outputs are ordered queries, keys, values, and by head within each."""
    attention_output: _Projection
    mlp_input: _Projection
    mlp_output: _Projection
    activation: Callable[[Tensor], Tensor]
    normalise: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
    """The norms of attention and MLP on `[b, h]`, without gain and bias."""
    group: dist.ProcessGroup
    head_size: int
    rotary_scale: float

    @classmethod
    def of(cls, block: Block) -> _Block:
        """Copy the current weights of a block."""
        with torch.no_grad():
            attention, mlp = block.self_attention, block.mlp
            assert isinstance(attention, Attention)
            norms = (block.input_layernorm, block.pre_mlp_layernorm)
            normalise, gains = zip(*(_normalisation(norm) for norm in norms), strict=True)
            activation, factor = _activation(block.config.activation_func)
            group = block.core.groups.tp
            return cls(
                _Projection.after_norm(norms[0], *_queries_keys_values(attention), gain=gains[0]),
                _Projection.of_part(attention.linear_proj, group),
                _Projection.after_norm(
                    norms[1],
                    mlp.linear_fc1.weight,
                    mlp.linear_fc1.bias,
                    gain=gains[1],
                    factor=factor,
                ),
                _Projection.of_part(mlp.linear_fc2, group, factor=1.0 / factor),
                activation,
                normalise,
                group,
                attention.head_size,
                attention.rotary_scale,
            )

    def run_(
        self,
        hidden: Tensor,
        write: Callable[[Tensor], object],
        keys: Tensor,
        values: Tensor,
        turn: Tensor | None,
        added: Tensor | None = None,
    ) -> None:
        """Apply the block to hidden states `[b, h]` of the new tokens, in place.

        Args:
            write: writes the new keys and values `[2, b, n, d]` to the cache.
            keys: all keys including the new ones, as `_places` yields them; `values` likewise.
            turn: rotations from `turn`; None without rotary positions.
            added: added to the scores of all tokens, `[t]` in the dtype of `hidden`: 0, or -∞ to
                hide a token; None adds nothing.
        """
        batch, size = hidden.shape[0], self.head_size
        heads = self.query_key_value(self.normalise[0](hidden)).view(batch, 3, -1, size)
        if turn is not None:
            _rotate_(heads[:, :2], turn)
        # Before attention, since a token attends to itself too.
        write(heads.narrow(1, 1, 2).transpose(0, 1))
        mixed = _mix(heads.select(1, 0), keys, values, added).view(batch, -1)
        self.attention_output.add_to_(hidden, mixed, self.group)
        inner = self.activation(self.mlp_input(self.normalise[1](hidden)))
        self.mlp_output.add_to_(hidden, inner, self.group)

    def turn(self, coordinates: Tensor) -> Tensor:
        """Return rotations for coordinates `[b or 1, axes]`: complex `[b or 1, 1, 1, d / 2]`."""
        return torch.complex(*turns(coordinates[:, None], self.head_size, scale=self.rotary_scale))


def _queries_keys_values(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Return weight `[3 · n · d, h]` and bias in the order of `_Block`, with 1/√d folded in."""
    size, linear = attention.head_size, attention.linear_qkv

    def ordered(rows: Tensor) -> Tensor:
        query, key, value = split_heads(rows, len(rows) // (3 * size))
        return torch.cat([query * size**-0.5, key, value])

    return ordered(linear.weight), None if linear.bias is None else ordered(linear.bias)


def _activation(function: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return a function f and a factor a such that the activation is f(a · x) / a."""
    if function is quick_gelu:
        return functools.partial(F.silu, inplace=True), QUICK_GELU_FACTOR
    return function, 1.0


def _normalisation(norm: Norm) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return a norm without gain and bias, and a factor for the gain.

    On a CPU the factor of an RMS norm is √h, since x / √(mean x² + ε) = √h · x / √(Σx² + h · ε).
    """
    width = len(norm.weight)
    if is_fused(norm.weight):
        # One kernel, which computes in float32 for any dtype.
        fused = F.layer_norm if norm.subtracts_mean else F.rms_norm
        return lambda x: fused(x, (width,), eps=norm.eps), 1.0
    if norm.subtracts_mean:
        return lambda x: F.layer_norm(x.float(), (width,), eps=norm.eps).to(x.dtype), 1.0
    root = norm.weight.new_full((), math.sqrt(width * norm.eps), dtype=torch.float32)

    def divide(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, root)).to(x.dtype)

    return divide, math.sqrt(width)


def _rotate_(heads: Tensor, turn: Tensor) -> None:
    """Rotate queries and keys `[b, 2, n, d]` in place, like `kernels.apply_rotary`."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    heads.copy_(torch.view_as_real(pairs * turn).flatten(-2))


def _mix(query: Tensor, keys: Tensor, values: Tensor, added: Tensor | None = None) -> Tensor:
    """Attend with scaled queries `[b, n, d]`; other arguments as of `_Block.run_`."""
    if query.dtype == torch.float32:
        # For one query, two matrix products are faster than SDPA.
        scores = torch.bmm(query.reshape(-1, 1, query.shape[2]), keys)
        if added is not None:
            scores.add_(added)
        return torch.bmm(scores.softmax(-1), values)
    # Half-precision scores would be too coarse; SDPA computes them in float32. Not all versions of
    # torch have fused kernels for three dimensions.
    heads = query.shape[:2]
    keys, values = keys.transpose(1, 2).unflatten(0, heads), values.unflatten(0, heads)
    mask = None if added is None else added[None, None, None]
    return F.scaled_dot_product_attention(
        query[:, :, None], keys, values, attn_mask=mask, scale=1.0
    )
