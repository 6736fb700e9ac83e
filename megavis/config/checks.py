"""Checks between keys of different sections, and between the config and the cluster.

A check yields `(key, sentence)`: the wrong key and what would be right. The loader turns that
into a message with file and line. Settings that Transformer Engine lacks, or that we have not
verified for the installed version, are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator

from megavis.config.errors import UserError, counted
from megavis.config.finetune_checks import (
    check_finetuning,
    check_finetuning_batch,
    check_null_label,
)
from megavis.config.schema import ConfigIssue, ModelConfig, RunConfig
from megavis.config.section import DataConfig, EvaluationConfig, ParallelConfig


def check_config(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield errors that do not depend on the number of processes."""
    own = [*config.objective.check(config)]
    yield from _check_sizes(config)
    yield from _check_positions(config)
    yield from _check_data(config.data)
    yield from _check_samples(config)
    yield from _check_deepspeed(config.parallel, config.training.precision)
    yield from _check_offload(config.parallel)
    yield from check_transformer_engine(config)
    yield from own
    if not own:  # Others ask the objective what it is made of.
        yield from _check_stages(config)
        yield from check_null_label(config)
    yield from check_finetuning(config)
    if config.evaluation is not None:
        yield from _check_evaluation(config.evaluation, config.data)
    yield from _check_schedule(config)
    is_linear = config.finetune is not None and config.finetune.linear_evaluation
    algorithm = config.optimizer.algorithm
    if algorithm in ("sgd", "lars") and not is_linear:
        text = f"{algorithm} is for finetune.linear_evaluation, whose matrix is not partitioned"
        yield "optimizer.algorithm", f"{text}; use adam here"
    if algorithm == "adafactor" and config.parallel.offload_optimizer == "nvme":
        text = "nvme has not been tested with adafactor; use cpu, or adam"
        yield "parallel.offload_optimizer", text
    if config.optimizer.ema_decay and config.parallel.offload_optimizer == "nvme":
        text = "its average cannot be kept on a disk; set parallel.offload_optimizer to cpu"
        yield "optimizer.ema_decay", text
    yield from _check_rollbacks(config)


def _check_schedule(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check the keys of the learning rate against each other."""
    if config.schedule.halve_every and config.schedule.decay != "constant":
        text = f"applies to schedule.decay constant, not {config.schedule.decay}"
        yield "schedule.halve_every", text
    if config.schedule.min_rate > config.optimizer.learning_rate:
        yield "schedule.min_rate", "is above optimizer.learning_rate, where the decay starts"
    if config.schedule.min_rate and config.schedule.decay == "constant":
        yield "schedule.min_rate", "applies to schedule.decay cosine and linear, not constant"
    if config.schedule.warmup_rate is not None and not config.schedule.warmup_steps:
        yield "schedule.warmup_rate", "applies to schedule.warmup_steps, which is 0"
    if config.schedule.warmup_steps > config.training.steps:
        yield (
            "schedule.warmup_steps",
            f"{config.schedule.warmup_steps} is more than training.steps = {config.training.steps}",
        )


def require_world(config: RunConfig, world_size: int) -> None:
    """Raise UserError if the config does not fit `world_size` processes."""
    issues = list(check_world(config, world_size))
    if issues:
        raise UserError.of(issues)


def check_world(config: RunConfig, world_size: int) -> Iterator[ConfigIssue]:
    """Yield errors of this config on `world_size` processes."""
    parallel, training = config.parallel, config.training
    model_parallel, context = parallel.model_parallel_size, parallel.context_parallel_size
    if world_size % model_parallel:
        yield (
            "parallel.tensor_model_parallel_size",
            f"{counted(world_size, 'process', 'processes')}"
            f" {'does' if world_size == 1 else 'do'} not divide into groups of tensor size"
            f" {parallel.tensor_model_parallel_size}"
            f"{f' × context size {context}' if context > 1 else ''} × pipeline size"
            f" {parallel.pipeline_model_parallel_size}; start a multiple of {model_parallel}",
        )
        return
    data_parallel = world_size // model_parallel
    if training.batch_size % data_parallel:
        yield (
            "training.batch_size",
            f"{training.batch_size} is not divisible by the data-parallel size {data_parallel};"
            f" {_nearest_multiple(training.batch_size, data_parallel)} would",
        )
        return
    micro = training.micro_batch(data_parallel)
    if training.batch_size % (micro * data_parallel):
        yield (
            "training.batch_size",
            f"{training.batch_size} must be micro_batch_size {micro} × accumulation ×"
            f" data-parallel size {data_parallel};"
            f" {_nearest_multiple(training.batch_size, micro * data_parallel)} would be",
        )
    if data_parallel % parallel.hierarchical_partition_size:
        yield (
            "parallel.hierarchical_partition_size",
            f"{parallel.hierarchical_partition_size} does not divide the data-parallel size"
            f" {data_parallel}; it could be {_divisors(data_parallel)}",
        )
    yield from check_finetuning_batch(config, micro, data_parallel)


def _check_evaluation(evaluation: EvaluationConfig, data: DataConfig) -> Iterator[ConfigIssue]:
    if data.validation is None:
        yield "data.validation", "is missing; `evaluation` needs it"
    if "frechet" not in evaluation.what:
        return
    if evaluation.reference is None:
        text = "is missing; `frechet` needs it: a file of `megavis evaluate statistics`"
        yield "evaluation.reference", text
    if (evaluation.inception is None) == (evaluation.network is None):
        text = "has `frechet`, which needs one network: evaluation.inception or evaluation.network"
        yield "evaluation.what", text


def _check_sizes(config: RunConfig) -> Iterator[ConfigIssue]:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    if config.objective.has_blocks and not model.num_layers:
        text = "must set num_layers (1 or more), hidden_size and num_attention_heads"
        yield "model", f"{text}: {config.objective.name} has Transformer blocks"
    if model.hidden_size % model.num_attention_heads:
        yield (
            "model.num_attention_heads",
            f"hidden_size {model.hidden_size} is not divisible by"
            f" {model.num_attention_heads} heads",
        )
    if model.num_attention_heads % parallel.head_parts:
        yield (
            "model.num_attention_heads",
            f"{model.num_attention_heads} heads are not divisible by {parallel.head_parts_text};"
            f" use {_divisors(model.num_attention_heads)}",
        )
    if model.mlp_size % tensor:
        text = f"{model.mlp_size} is not divisible by tensor_model_parallel_size {tensor}"
        yield "model.ffn_hidden_size", text
    if parallel.sequence_parallel and tensor == 1:
        yield (
            "parallel.sequence_parallel",
            "splits over the tensor group, which has one process; set"
            " tensor_model_parallel_size to 2 or more, or this to false",
        )


def _check_stages(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that each pipeline stage has a block."""
    stages = config.parallel.pipeline_model_parallel_size
    # A fine-tuned model is only the backbone.
    blocks = config.model.num_layers
    blocks += config.objective.num_further_blocks(config) if config.finetune is None else 0
    if stages > max(1, blocks):
        yield (
            "parallel.pipeline_model_parallel_size",
            f"{blocks} layers cannot fill {stages} pipeline stages; use at most {blocks}",
        )


def _check_positions(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check sizes: rotary positions rotate pairs of channels, divided evenly between the axes."""
    model = config.model
    if model.positions == "relative_2d" and not config.objective.has_relative_positions:
        yield "model.positions", f"{config.objective.name} has no relative_2d positions"
    unit = {"rope_1d": 2, "rope_2d": 4}.get(model.positions or "", 1)
    if model.head_size % unit:
        yield (
            "model.positions",
            f"{model.positions} needs a head width divisible by {unit}, not {model.head_size};"
            " change num_attention_heads",
        )
    if model.positions in ("sincos", "learned_sincos") and model.hidden_size % 4:
        text = f"{model.positions} needs a hidden_size divisible by 4, not {model.hidden_size}"
        yield "model.positions", text


def _check_few(data: DataConfig) -> Iterator[ConfigIssue]:
    if not isinstance(data.train, str):
        text = "draws images of one folder, and data.train names several"
        yield "data.images_per_class", text
    if data.window_shards is not None:
        yield "data.window_shards", "mixes all images of shards; remove it with images_per_class"


def _check_data(data: DataConfig) -> Iterator[ConfigIssue]:
    if not data.train:
        yield "data.train", "names no folder: give one, or a list with `path` and `weight`"
    if data.images_per_class is not None:
        yield from _check_few(data)
    if data.cache_gib is not None and data.cache is None:
        yield "data.cache_gib", "is the size of data.cache, which names no folder: set it too"
    ranges = {
        "scale": "share",
        "aspect": "width / height",
        "short_sides": "length",
        "jitter": "factor",
    }
    for key, what in ranges.items():
        least, most = getattr(data, key)
        if least > most:
            yield f"data.{key}", f"{[least, most]} must begin with the smaller {what}"
    for place, source in enumerate(data.train_sources):
        if source.crop is not None and data.crop == "window":
            text = "all folders hold images of one size, as data.crop window needs: remove it"
            yield f"data.train.{place}.crop", text
    if "scaled" in data.training_crops and data.crop_size > data.short_sides[0]:
        text = f"{data.crop_size} is too large for data.short_sides"
        yield "data.crop_size", f"{text} = {list(data.short_sides)}"
    if data.short_side is not None and data.short_side < data.image_size:
        text = f"{data.short_side} is too small for data.image_size = {data.image_size}"
        yield "data.short_side", text


def _check_samples(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that samples are squares, or recordings if the paper supports them."""
    data = config.data
    if data.frames is None and not data.image_size:
        yield "data.image_size", "must be the side of the images in pixels, 1 or more"
    if data.frames is not None and not config.objective.takes_frames:
        yield "data.frames", f"{config.objective.name} reads images: set data.image_size instead"
    elif data.frames is not None and data.image_size:
        yield "data.image_size", "is for images, and data.frames for recordings: set only one"
    if data.frames is None:
        for key in ("time_shift", "background_noise", "normalize_frames"):
            if getattr(data, key):
                yield f"data.{key}", "is for recordings, which data.frames describes: remove it"
    elif data.time_shift >= data.frames[0] / 100:
        yield "data.time_shift", f"must be shorter than {data.frames[0]} frames of 10 ms"


def _check_deepspeed(parallel: ParallelConfig, precision: str) -> Iterator[ConfigIssue]:
    pipeline = parallel.pipeline_model_parallel_size > 1
    if precision != "float32" and parallel.zero_stage == 0:
        yield (
            "parallel.zero_stage",
            f"0 keeps no float32 master weights and gradients under {precision}; the nearest legal"
            " choice is 1",
        )
    if pipeline and precision == "fp16" and parallel.zero_stage < 2:
        yield (
            "training.precision",
            f"fp16 accumulates pipeline gradients in half precision in DeepSpeed under zero_stage"
            f" {parallel.zero_stage}; use bf16, or zero_stage 2, which is experimental with stages",
        )
    if parallel.hierarchical_partition_size > 1:
        yield from _check_hierarchy(parallel)


def _check_hierarchy(parallel: ParallelConfig) -> Iterator[ConfigIssue]:
    key = "parallel.hierarchical_partition_size"
    if parallel.zero_stage != 3:
        yield key, f"needs zero_stage 3, not {parallel.zero_stage}; set it to 3 or this to 1"
    if parallel.tensor_model_parallel_size > 1:
        text = "DeepSpeed's groups are of consecutive processes, which here hold different weights"
        yield key, f"needs tensor_model_parallel_size 1: {text}; set this to 1"
    if parallel.context_parallel_size > 1:
        text = "is not supported with context parallelism"
        yield key, f"{text}; set this or context_parallel_size to 1"
    if parallel.offload_parameters != "none":
        yield key, "keeps another copy of the weights on the GPU; set offload_parameters to none"


def _check_offload(parallel: ParallelConfig) -> Iterator[ConfigIssue]:
    if parallel.offload_parameters != "none" and parallel.zero_stage != 3:
        text = f"needs zero_stage 3, not {parallel.zero_stage}; set it to 3 or this to none"
        yield "parallel.offload_parameters", text
    if parallel.offload_optimizer == "cpu" and parallel.zero_stage == 0:
        yield "parallel.offload_optimizer", "needs zero_stage 1, 2 or 3; the nearest is 1"
    if parallel.offload_optimizer == "nvme" and parallel.zero_stage != 3:
        yield "parallel.offload_optimizer", "nvme needs zero_stage 3; the nearest choice is cpu"
    if parallel.pipeline_model_parallel_size > 1:
        for key in ("offload_optimizer", "offload_parameters"):
            if getattr(parallel, key) != "none":
                text = "is not supported with pipeline parallelism; the nearest choice is none"
                yield f"parallel.{key}", text
    offloads = (parallel.offload_optimizer, parallel.offload_parameters)
    if "nvme" in offloads and not parallel.nvme_path:
        yield "parallel.nvme_path", "names the folder for nvme offload and must be given"


def _check_rollbacks(config: RunConfig) -> Iterator[ConfigIssue]:
    """Check that an old enough checkpoint is kept until bad steps are detected."""
    training, keep = config.training, config.checkpoint
    if not training.max_rollbacks:
        return
    if not training.max_bad_steps:
        yield "training.max_rollbacks", "applies after training.max_bad_steps, which is 0"
    reach = training.rollback_margin + training.max_bad_steps
    if (keep.keep_last - 1) * keep.every < reach:
        yield (
            "training.max_rollbacks",
            f"rolls back by {reach} steps (rollback_margin + max_bad_steps) or more; keep"
            f" checkpoints for as long: (checkpoint.keep_last - 1) × checkpoint.every is"
            f" {(keep.keep_last - 1) * keep.every}",
        )


def _nearest_multiple(value: int, unit: int) -> int:
    return max(unit, round(value / unit) * unit)


def _divisors(value: int) -> str:
    return ", ".join(str(i) for i in range(1, min(value, 64) + 1) if value % i == 0)


FP8_MULTIPLE = 16
"""Sides of a matrix product in FP8 must be multiples of this (documentation of Transformer Engine's
`autocast`)."""


def check_transformer_engine(config: RunConfig) -> Iterator[ConfigIssue]:
    """Reject settings that Transformer Engine does not support or that we have not verified."""
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
    """Yield the sizes of a stack that FP8 does not support, split over a tensor group."""
    unit = FP8_MULTIPLE * tensor_size
    parts = f" × tensor_model_parallel_size {tensor_size}" if tensor_size > 1 else ""
    sizes = {"hidden_size": model.hidden_size, "ffn_hidden_size": model.mlp_size}
    for key, size in sizes.items():
        if size % unit:
            text = f"must be divisible by {FP8_MULTIPLE}{parts} for training.fp8"
            yield f"model.{key}", f"{size} {text}"
