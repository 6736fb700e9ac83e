"""Checks of `training.kernels: transformer_engine` and `training.fp8`.

Refused is what Transformer Engine cannot do, and what cannot be reasoned safe without its sources
of the installed version.
"""

from __future__ import annotations

from collections.abc import Iterator

from megavis.config.schema import ConfigIssue, ModelConfig, RunConfig

FP8_MULTIPLE = 16
"""Sides of a matrix product in FP8 are multiples of this, as the documentation of Transformer
Engine's `autocast` says."""


def check_transformer_engine(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield the keys that Transformer Engine excludes."""
    training, parallel = config.training, config.parallel
    if training.kernels != "transformer_engine":
        if training.fp8:
            text = f"needs training.kernels transformer_engine, not {training.kernels}"
            yield "training.fp8", text
        return
    if not config.objective.has_blocks:
        text = f"transformer_engine is for Transformer blocks, and {config.objective.name} has none"
        yield "training.kernels", f"{text}; use auto"
    if training.precision == "float32" and not training.tf32:
        text = "must be true, as transformer_engine multiplies float32 in TensorFloat-32"
        yield "training.tf32", f"{text}; or set training.precision to bf16"
    if parallel.zero_stage == 3:
        text = "frees weights to which transformer_engine may refer until the backward pass"
        yield "parallel.zero_stage", f"3 {text}; the nearest legal choice is 2"
    if parallel.activation_checkpointing == "selective":
        text = "frees inputs of matrix products, of which transformer_engine keeps copies"
        yield "parallel.activation_checkpointing", f"selective {text}; use full or none"
    if training.deterministic:
        text = "torch cannot check the kernels of transformer_engine"
        yield "training.deterministic", f"{text}; use training.kernels auto, or false"
    if training.fp8:
        yield from _check_fp8(config)


def _check_fp8(config: RunConfig) -> Iterator[ConfigIssue]:
    precision = config.training.precision
    if precision != "bf16":
        yield "training.fp8", f"needs training.precision bf16, not {precision}"
    if config.model.num_layers:
        yield from check_fp8_sizes(config.model, config.parallel.tensor_model_parallel_size)


def check_fp8_sizes(model: ModelConfig, tensor_size: int) -> Iterator[ConfigIssue]:
    """Yield the sizes of a stack whose matrices, split over a tensor group, do not suit FP8."""
    unit = FP8_MULTIPLE * tensor_size
    parts = f" × tensor_model_parallel_size {tensor_size}" if tensor_size > 1 else ""
    sizes = {"hidden_size": model.hidden_size, "ffn_hidden_size": model.mlp_size}
    for key, size in sizes.items():
        if size % unit:
            text = f"must be divisible by {FP8_MULTIPLE}{parts} for training.fp8"
            yield f"model.{key}", f"{size} {text}"
