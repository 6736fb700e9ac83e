"""The Transformer block of every paper, made of Megatron-Core's layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megavis.config.schema import RunConfig
from megavis.model.attention import Attention
from megavis.model.init import Initialization
from megavis.model.linear import RowParallelLinear
from megavis.model.norms import Norm
from megavis.model.visibility import Kind, Visibility


def quick_gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 x), the approximation of GELU that iGPT uses."""
    return x * (1.702 * x).sigmoid()


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
}


@dataclass(frozen=True)
class Core:
    """What is needed to build any layer of a model: sizes, groups and initial weights."""

    config: RunConfig
    megatron: TransformerConfig
    groups: ProcessGroupCollection
    initialization: Initialization
    visibility_kind: Kind

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        groups: ProcessGroupCollection,
        initialization: Initialization,
        visibility_kind: Kind,
    ) -> Core:
        """Translate megavis's config into Megatron's."""
        return cls(config, megatron_config(config, groups), groups, initialization, visibility_kind)


def megatron_config(config: RunConfig, groups: ProcessGroupCollection) -> TransformerConfig:
    """Return Megatron's config for these sizes, with its CUDA-only fusions off.

    The tensor size is that of the groups, not of the file: an evaluation may read a run in
    another layout than the one it was trained in.
    """
    model, tensor_size = config.model, groups.tp.size()
    settings: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.mlp_size,
        layernorm_epsilon=model.norm_epsilon,
        normalization="RMSNorm" if model.normalization == "rms_norm" else "LayerNorm",
        activation_func=_ACTIVATIONS[model.activation],
        add_bias_linear=model.add_bias,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_size,
        sequence_parallel=config.parallel.sequence_parallel and tensor_size > 1,
        # Weights drawn on the CPU are the same at every tensor-parallel size.
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    with warnings.catch_warnings():
        # Megatron warns of its own default for CUDA graphs, which are not used here.
        warnings.simplefilter("ignore", UserWarning)
        return TransformerConfig(**settings)


class FeedForward(MLP):
    """Megatron's MLP with its two matrices initialised each in its own way."""

    def __init__(self, config: TransformerConfig, core: Core, **_: Any) -> None:
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(
            config,
            submodules,
            ffn_hidden_size=config.ffn_hidden_size,
            tp_group=core.groups.tp,
        )


class Block(TransformerLayer):
    """One layer of the Transformer; what it takes and gives is what travels between stages."""

    def __init__(self, core: Core, number: int) -> None:
        initialization, parallel = core.initialization, core.config.parallel
        # Megatron's MLP reads its fills from the config; both are functions of one block alone.
        core.megatron.init_method = initialization.mlp_input
        core.megatron.output_layer_init_method = initialization.mlp_output
        recompute_attention = parallel.activation_checkpointing == "selective"
        super().__init__(
            core.megatron,
            TransformerLayerSubmodules(
                input_layernorm=Norm,
                self_attention=ModuleSpec(
                    Attention,
                    params={"initialization": initialization, "recompute": recompute_attention},
                ),
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=Norm,
                mlp=_feed_forward_type(core),
                mlp_bda=get_bias_dropout_add,
            ),
            layer_number=number,
            pg_collection=core.groups,
        )
        self.recomputes = parallel.activation_checkpointing == "full"
        self.visibility = Visibility(core.visibility_kind)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[s, b, h]` to `[s, b, h]`, with the visibility that the model was built with."""
        if self.recomputes and self.training:
            # Reentrant: ZeRO-3 gathers and releases weights in module hooks, which the
            # non-reentrant form's saved-tensor check takes for changed tensors.
            return checkpoint(self.attend, hidden, self.visibility, use_reentrant=True)
        return self.attend(hidden, self.visibility)

    def attend(self, hidden: Tensor, visibility: Visibility) -> Tensor:
        """Run the layer `[s, b, h]` under a given visibility, for example one with a cache."""
        return super().forward(hidden, attention_mask=visibility)[0]


def _feed_forward_type(core: Core) -> type:
    """Return `FeedForward` bound to this core.

    Megatron 0.16 builds the MLP from a class or a spec, 0.19 calls what it is given with other
    keywords; a class with one constructor suits both.
    """

    class BoundFeedForward(FeedForward):
        def __init__(self, config: TransformerConfig, **_: Any) -> None:
            super().__init__(config, core)

    return BoundFeedForward
