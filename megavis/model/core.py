"""The Transformer block of every paper, made of Megatron-Core's layers."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megavis.config.schema import ModelConfig, RunConfig
from megavis.model.activations import ACTIVATIONS, Branch, with_recomputed
from megavis.model.attention import Attention, CrossAttention
from megavis.model.block_layers import block_layers
from megavis.model.compiled_blocks import CompiledBlocks
from megavis.model.context_parallel import all_tokens, own_tokens, splits_context
from megavis.model.dropout import SAMPLES, add_to_residual, draw_kept, drop_path_of
from megavis.model.feed_forward import feed_forward_type
from megavis.model.kernels import compiles_blocks
from megavis.model.layer_state import LayerState, PackedState
from megavis.model.modulation import MODULATION, OF_BLOCK, Modulation, modulate
from megavis.model.norms import GainNorm, Norm
from megavis.model.parameters import Initialization
from megavis.model.sequence_regions import own_rows
from megavis.model.tensor_parallel import Precision, splits_tokens
from megavis.model.visibility import (
    AttentionContext,
    KeyValueCache,
    OncePerStep,
    Visibility,
    VisibilityKind,
)
from megavis.parallel.random import rank_local_rng

BLOCKS = "blocks"
"""Name of a paper's first stack, used in parameter names."""

READ_ROWS = "read_rows"
"""Name under which the indices of the rows that the head reads, int64 `[1, q]`, are carried; the
last block drops all others. Without it the head reads all rows, or the queries of two streams."""

MEMORY = "memory"
"""Name under which an encoder's output `[c, b, h]` is carried; blocks then have cross-attention."""


@dataclass(frozen=True)
class StackSpec:
    """Specification of a stack of equal blocks.

    Attributes:
        name: prefix of the blocks' names; also names the draws of drop path.
        model: width, heads, MLP, number of blocks, norms, biases and dropout.
        carried_names: names of the tensors that are carried with the hidden states; see
            `LayerState`. With `drop_path`, the last is `SAMPLES`.
        drop_path: probability of dropping a branch of the last block for an image; it increases
            linearly from 0 in the first block (`dropout.py`).
        relative_grid: rows and columns of the grid of a relative position bias; needs `coordinates`
            among the carried tensors.
        may_split_tokens: whether sequence and context parallelism, if the layout has them, split
            sequences.
    """

    name: str
    model: ModelConfig
    visibility_kind: VisibilityKind
    initialization: Initialization
    carried_names: tuple[str, ...] = ()
    drop_path: float = 0.0
    relative_grid: tuple[int, int] | None = None
    may_split_tokens: bool = True


@dataclass(frozen=True)
class Core:
    """Everything needed to build layers of a stack: config, process groups and specification."""

    config: RunConfig
    groups: ProcessGroupCollection
    stack: StackSpec
    megatron: TransformerConfig
    """Megatron's config for the stack."""
    once: OncePerStep = field(default_factory=OncePerStep, init=False, repr=False, compare=False)
    compiled: CompiledBlocks = field(
        default_factory=CompiledBlocks, init=False, repr=False, compare=False
    )

    @classmethod
    def create(cls, config: RunConfig, groups: ProcessGroupCollection, stack: StackSpec) -> Core:
        """Build, deriving Megatron's config."""
        return cls(config, groups, stack, megatron_config(config, groups, stack))

    def with_stack(self, **changes: Any) -> Core:
        """Return a core of the same run with changed fields of `StackSpec`."""
        return self.create(self.config, self.groups, replace(self.stack, **changes))

    @property
    def model(self) -> ModelConfig:
        """Sizes of the stack."""
        return self.stack.model

    @functools.cached_property
    def feed_forward(self) -> type:
        """The MLP of its blocks: one class for all, so that they can share a graph."""
        return feed_forward_type(self)

    @property
    def visibility_kind(self) -> VisibilityKind:
        """Which token attends to which."""
        return self.stack.visibility_kind

    @property
    def carried_names(self) -> tuple[str, ...]:
        """Names of the tensors that are carried with the hidden states."""
        return self.stack.carried_names

    @property
    def has_memory(self) -> bool:
        """True if blocks have cross-attention to an encoder's output."""
        return MEMORY in self.carried_names

    @property
    def is_modulated(self) -> bool:
        """True if a condition modulates norms and branches."""
        return MODULATION in self.carried_names

    def attention_context(
        self, carried: Mapping[str, Tensor], cache: KeyValueCache | None = None
    ) -> AttentionContext:
        """Return visibility and positions from the carried tensors."""
        visibility = Visibility(
            self.visibility_kind,
            content_groups=carried.get("content_groups"),
            query_groups=carried.get("query_groups"),
            context=carried.get("context"),
        )
        return AttentionContext(visibility, carried.get("coordinates"), cache, once=self.once)


def megatron_config(
    config: RunConfig, groups: ProcessGroupCollection, stack: StackSpec
) -> TransformerConfig:
    """Return Megatron's config for a stack, without CUDA-only fusions.

    Sizes come from the groups, not from the config file: a run may be evaluated in another layout
    than it was trained in.
    """
    model, tensor_size = stack.model, groups.tp.size()
    splits_tokens = stack.may_split_tokens and config.parallel.sequence_parallel
    settings: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.mlp_size,
        layernorm_epsilon=model.norm_epsilon,
        normalization="RMSNorm" if model.normalization == "rms_norm" else "LayerNorm",
        activation_func=ACTIVATIONS[model.activation],
        add_bias_linear=model.add_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        # The pipeline's size is not set: stages are DeepSpeed's, and layers do not depend on them.
        tensor_model_parallel_size=tensor_size,
        # Only `splits_context` reads it: Megatron's attention, which would exchange keys and
        # values, is replaced by one that trades tokens for heads.
        context_parallel_size=groups.cp.size() if stack.may_split_tokens else 1,
        # Megatron rejects it without a tensor group, and a run may be evaluated on one process.
        sequence_parallel=splits_tokens and tensor_size > 1,
        # Used by Megatron's MLP; other layers take their initialization as an argument.
        init_method=stack.initialization.mlp_input,
        output_layer_init_method=stack.initialization.mlp_output,
        # Weights drawn on the CPU are the same at every tensor-parallel size.
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # It would add gradients to `main_grad`; ZeRO reduces and adds those in `grad`.
        gradient_accumulation_fusion=False,
    )
    with warnings.catch_warnings():
        # Megatron warns about its own default for CUDA graphs, which are not used here.
        warnings.simplefilter("ignore", UserWarning)
        return TransformerConfig(**settings)


def _head_norm(model: ModelConfig) -> type[Norm] | None:
    """Return the norm of a head's queries and keys, of the same kind as a block's."""
    if not model.qk_norm:
        return None
    return GainNorm if model.norm_bias == "last" else Norm


class Block(TransformerLayer):
    """A Transformer layer that maps a `PackedState` to a `PackedState`."""

    def __init__(self, core: Core, number: int) -> None:
        parallel, model = core.config.parallel, core.model
        layers = block_layers()
        norm = layers.gain_norm if model.norm_bias == "last" else layers.norm
        attention = {
            "initialization": core.stack.initialization,
            "has_bias": model.has_biased_attention,
        }
        seen = {
            "visibility_kind": core.visibility_kind,
            "rotary_scale": model.position_scale,
            "relative_grid": core.stack.relative_grid,
            "head_norm": _head_norm(model),
        }
        tokens = core.megatron, core.groups.tp
        # Megatron has one probability for all residual branches; GIVT drops the output of attention
        # but only the inner features of the MLP.
        add_attended = add_to_residual(model.residual_dropout, *tokens)
        cross: dict[str, Any] = {}
        if core.has_memory:
            cross["pre_cross_attn_layernorm"] = norm
            cross["cross_attention"] = ModuleSpec(CrossAttention, params=attention)
            cross["cross_attn_bda"] = add_attended
        super().__init__(
            core.megatron,
            TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=ModuleSpec(Attention, params=attention | seen),
                self_attn_bda=add_attended,
                **cross,
                pre_mlp_layernorm=norm,
                mlp=core.feed_forward,
                mlp_bda=add_to_residual(model.hidden_dropout, *tokens),
            ),
            layer_number=number,
            pg_collection=core.groups,
        )
        self.core = core
        self.modulation: Modulation | None = None
        if core.is_modulated:
            self.modulation = Modulation(core.megatron, OF_BLOCK)
        self.checkpointing = parallel.activation_checkpointing
        self.is_last = number == model.num_layers
        # Draws must agree within a tensor group for replicated tokens and differ for split heads. A
        # graph cannot switch generators between the two, so such blocks are not compiled.
        splits = core.groups.tp.size() > 1 and model.blocks_have_dropout
        agrees = bool(model.hidden_dropout or model.residual_dropout)
        self.draws_alike = splits and agrees and not core.megatron.sequence_parallel
        self.draws_apart = splits and not self.draws_alike
        # ZeRO-3 gathers such a block's weights in hooks of its layers, which a graph does not run
        # (`training/engine.py`).
        self.is_gathered_in_parts = parallel.zero_stage == 3 and bool(core.carried_names)
        self.precision: Precision = contextlib.nullcontext
        if core.config.training.fp8:
            self.precision = layers.fp8(model, core.groups.tp.size())

    @property
    def feature_norm(self) -> nn.Module:
        """The norm before attention."""
        return self.input_layernorm

    def forward(self, state: PackedState, cache: KeyValueCache | None = None) -> PackedState:
        """Run the layer; `cache` is the KV cache in generation."""
        stream = LayerState.unpack(state, self.core.carried_names)
        attention_context = self.core.attention_context(stream.carried, cache)
        if self.training and self.core.stack.drop_path:
            attention_context = replace(
                attention_context, kept=self._draw_kept(stream.carried[SAMPLES])
            )
        if self.is_last:
            # The head reads only the tokens from `query_start` on.
            attention_context = replace(
                attention_context, query_start=attention_context.visibility.query_start
            )
        memory, vectors = stream.carried.get(MEMORY), stream.carried.get(MODULATION)
        hidden = self.run(stream.hidden, attention_context, memory, vectors)
        rows = (
            stream.carried[READ_ROWS][0] if self.is_last and READ_ROWS in stream.carried else None
        )
        if rows is not None:
            hidden = self._read(hidden, rows)
        if vectors is None:
            return stream.with_hidden(hidden).pack()
        # The last norm needs the vectors of the tokens that the head reads.
        vectors = self._from(attention_context.query_start, vectors)
        if rows is not None:
            vectors = self._read(vectors, rows)
        return LayerState(hidden, {**stream.carried, MODULATION: vectors}).pack()

    def run(
        self,
        hidden: Tensor,
        attention_context: AttentionContext,
        memory: Tensor | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Apply `attend`, compiled and recomputed in the backward pass if configured."""
        attend: Callable[..., Tensor] = self.attend
        stays_plain = self.draws_alike or self.is_gathered_in_parts
        if self.training and compiles_blocks(hidden.device) and not stays_plain:
            # Outside the graph, where each block would recompute masks and rotations.
            attention_context = self.self_attention.prepared(attention_context, hidden)
            attend = functools.partial(
                self.core.compiled, self.attend, attention_context.query_start
            )
        if self.training and self.draws_apart:
            attend = functools.partial(self._apart, attend)
        if self.checkpointing == "full" and self.training:
            # Reentrant: ZeRO-3 gathers and releases weights in module hooks, which the
            # non-reentrant implementation mistakes for modified saved tensors.
            return checkpoint(
                attend, hidden, attention_context, memory, vectors, use_reentrant=True
            )
        return attend(hidden, attention_context, memory, vectors)

    def _apart(self, attend: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Run with this process's generator, since a graph cannot switch generators."""
        group = self.core.groups.tp
        with rank_local_rng(group.rank(), group.size()):
            return attend(*inputs)

    def attend(
        self,
        hidden: Tensor,
        attention_context: AttentionContext,
        memory: Tensor | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Map `[s, b, h]` to `[q, b, h]`, the tokens from `attention_context.query_start` on.

        `memory`, `[c, b, h]`, is the output of an encoder, if there is one; `vectors`, `[s, b, h]`,
        modulate norms and branches.
        """
        # Inside the recomputed function, so that recomputation uses the same precision.
        with self.precision() if self.training else contextlib.nullcontext():
            return self._attend(hidden, attention_context, memory, vectors)

    def _attend(
        self,
        hidden: Tensor,
        attention_context: AttentionContext,
        memory: Tensor | None,
        vectors: Tensor | None,
    ) -> Tensor:
        if vectors is not None:
            return self._attend_modulated(hidden, attention_context, vectors)
        if (
            self._recomputes_norms
            or attention_context.query_start
            or attention_context.kept is not None
            or torch.compiler.is_compiling()
        ):
            return self._attend_by_branch(hidden, attention_context, memory)
        # Megatron passes `context_mask` to the cross-attention.
        return super().forward(
            hidden,
            attention_mask=attention_context,
            context=memory,
            context_mask=attention_context,
        )[0]

    def _attend_by_branch(
        self, hidden: Tensor, attention_context: AttentionContext, memory: Tensor | None
    ) -> Tensor:
        """Do what Megatron's layer does, for some tokens, with drop path or recomputed norms.

        Each branch is computed separately from the residual stream, so that it can be dropped.
        """
        # Parts are numbered by their draws: cross-attention is 2, although it runs second, so that
        # attention and MLP have the same draws with and without a memory.
        seen: dict[str, Any] = {"attention_mask": attention_context}
        residual = self._from(attention_context.query_start, hidden)
        mixed = self._branch(self.input_layernorm, self.self_attention, hidden, **seen)
        hidden = residual + attention_context.keep(self._added(self.self_attn_bda, mixed), part=0)
        if memory is not None:
            seen["key_value_states"] = memory
            mixed = self._branch(
                self.pre_cross_attn_layernorm, self.cross_attention, hidden, **seen
            )
            hidden = hidden + attention_context.keep(
                self._added(self.cross_attn_bda, mixed), part=2
            )
        mixed = self._branch(self.pre_mlp_layernorm, self.mlp, hidden)
        return hidden + attention_context.keep(self._added(self.mlp_bda, mixed), part=1)

    def _attend_modulated(
        self, hidden: Tensor, attention_context: AttentionContext, vectors: Tensor
    ) -> Tensor:
        """Do the same where vectors `[s, b, h]` shift, scale and gate."""
        assert self.modulation is not None
        start = attention_context.query_start
        shift, scale, *others = self.modulation(vectors)
        gate, shift_later, scale_later, gate_later = (self._from(start, each) for each in others)
        change = functools.partial(modulate, shift=shift, scale=scale)
        seen = {"attention_mask": attention_context}
        mixed = self._branch(self.input_layernorm, self.self_attention, hidden, change, **seen)
        added = gate * self._added(self.self_attn_bda, mixed)
        hidden = self._from(start, hidden) + attention_context.keep(added, part=0)
        change = functools.partial(modulate, shift=shift_later, scale=scale_later)
        mixed = self._branch(self.pre_mlp_layernorm, self.mlp, hidden, change)
        added = gate_later * self._added(self.mlp_bda, mixed)
        return hidden + attention_context.keep(added, part=1)

    def _branch(
        self,
        norm: nn.Module,
        branch: nn.Module,
        hidden: Tensor,
        change: Callable[[Tensor], Tensor] | None = None,
        **arguments: Any,
    ) -> Branch:
        """Return the output of a branch and its bias, with the norm recomputed if configured.

        `change` is applied to the norm's output.
        """

        def use(normed: Tensor) -> Branch:
            mixed: Branch = branch(normed if change is None else change(normed), **arguments)
            return mixed

        if self._recomputes_norms:
            return with_recomputed(norm, hidden, use)
        return use(norm(hidden))

    @property
    def _recomputes_norms(self) -> bool:
        """Whether norms are recomputed here; a compiled block's graph decides that itself."""
        selective = self.checkpointing == "selective" and self.training
        return selective and not torch.compiler.is_compiling()

    def _added(self, add: Callable[..., Any], mixed: Branch) -> Tensor:
        """Return the output of a branch, with its bias added and dropout applied."""
        # Megatron's function adds to a residual; a scalar zero as the residual gives the branch.
        added: Tensor = add(self.training, False)(
            mixed, mixed[0].new_zeros(()), self.hidden_dropout
        )
        return added

    def _from(self, first: int, hidden: Tensor) -> Tensor:
        """Return the tokens from `first` on, split again if tokens are split."""
        if first == 0:
            return hidden
        groups, config = self.core.groups, self.config
        # The last processes hold the tokens from `first` on: gather and split them again, so that
        # all processes hold equally many.
        return own_tokens(all_tokens(hidden, config, groups)[first:], config, groups)

    def _read(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the rows `[q, b, h]` of `[s, b, h]` with these indices, int64 `[q]` ascending.

        Where tokens are split, each process must hold equally many of them.
        """
        groups, first = self.core.groups, 0
        # As in `own_tokens`: split over the context group, and each part over the tensor group.
        for splits, group in (
            (splits_context(self.config), groups.cp),
            (splits_tokens(self.config), groups.tp),
        ):
            if splits:
                rows, first = own_rows(rows, group), first * group.size() + group.rank()
        return hidden.index_select(0, rows - first * len(hidden))

    def _draw_kept(self, samples: Tensor) -> Tensor:
        """Return the drop path factors of attention, MLP and cross-attention: `[p, b, 1]`."""
        core, number = self.core, self.layer_number
        return draw_kept(
            samples,
            num_parts=2 + core.has_memory,
            rate=drop_path_of(number, core.model.num_layers, core.stack.drop_path),
            seed=core.config.seed,
            # Blocks of two stacks have the same numbers and must not drop the same images.
            block=number if core.stack.name == BLOCKS else f"{core.stack.name}-{number}",
        )
