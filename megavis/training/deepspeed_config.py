"""Translate the config for DeepSpeed: the only file that uses DeepSpeed's JSON names."""

from __future__ import annotations

from typing import Any

from megavis.config.schema import RunConfig
from megavis.planning.states import bucket_size

# Smaller tensors stay whole on every process under ZeRO-3: gathering a norm's gain costs more in
# latency than it saves in memory.
_PERSISTENCE_THRESHOLD = 10_000


def deepspeed_config(
    config: RunConfig,
    data_parallel_size: int,
    *,
    carries_gradient: bool = False,
    on_gpu: bool = False,
) -> dict[str, Any]:
    """Return the config dictionary for `deepspeed.initialize`.

    Args:
        config: the run's config.
        data_parallel_size: processes that read different images.
        carries_gradient: whether a tensor other than the hidden states needs a gradient.
        on_gpu: pin host memory, and overlap communication with computation where that is safe.
    """
    # DeepSpeed partitions tensors sent between stages over the tensor group, assuming that
    # all its processes hold the same (under sequence parallelism they hold different tokens), and
    # then sends back only the gradient of the first tensor.
    cuts_stages = not config.parallel.sequence_parallel and not carries_gradient
    training = config.training
    micro = training.micro_batch(data_parallel_size)
    return {
        # DeepSpeed averages over the context group too, and assumes other images on each process.
        "train_batch_size": training.batch_size * config.parallel.context_parallel_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": training.batch_size // (micro * data_parallel_size),
        # ZeRO-0 clips in our own optimizer hook, which also computes the norm.
        "gradient_clipping": (
            config.optimizer.gradient_clipping if config.parallel.zero_stage else 0.0
        ),
        # At ZeRO-1, add each gradient to its float32 sum and free it as soon as it is computed;
        # otherwise both live until the next step.
        "bf16": {"enabled": training.precision == "bf16", "immediate_grad_update": True},
        "fp16": {"enabled": training.precision == "fp16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        # Absent: the compute precision.
        "communication_data_type": "fp32" if training.reduce_precision == "float32" else None,
        "zero_optimization": _zero(config, on_gpu=on_gpu),
        "pipeline": {"pipe_partitioned": cuts_stages, "grad_partitioned": cuts_stages},
        # DeepSpeed's list of tested optimizers lacks Adafactor and LARS.
        "zero_allow_untested_optimizer": True,
        # torch's fused Adam runs on CPU tensors too and needs no compiler.
        "zero_force_ds_cpu_optimizer": False,
        # It would synchronize twice per micro-batch; `metrics.jsonl` has the throughput.
        "timers": {"throughput": {"enabled": False}},
        "steps_per_print": 2**40,
        "wall_clock_breakdown": False,
    }


def _zero(config: RunConfig, *, on_gpu: bool) -> dict[str, Any]:
    parallel = config.parallel
    model, tensor_size = config.model, parallel.tensor_model_parallel_size
    section: dict[str, Any] = {
        "stage": parallel.zero_stage,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket_size(model.block_parameters, tensor_size),
    }
    if parallel.zero_stage < 3:
        # In bf16 at ZeRO-1 `BF16_Optimizer` ignores it. At ZeRO-2 DeepSpeed's second stream has
        # had races with contiguous gradients (its issues 5545, 7188, 7804 and 8061): off until
        # bf16 with and without it has been compared on two GPUs.
        section["overlap_comm"] = False
    elif on_gpu and parallel.pipeline_model_parallel_size == 1:
        section["overlap_comm"] = True
    if parallel.zero_stage == 3:
        section["stage3_param_persistence_threshold"] = _PERSISTENCE_THRESHOLD
        # Prefetch the next block's weights while this one computes.
        section["stage3_prefetch_bucket_size"] = model.block_parameters
        section["zero_hpz_partition_size"] = parallel.hierarchical_partition_size
        if parallel.pipeline_model_parallel_size > 1:
            # It sums gradient norms over the stages part by part, but the number of parts would
            # differ between stages.
            section["sub_group_size"] = 2**62
    for key, target in (
        ("offload_optimizer", parallel.offload_optimizer),
        ("offload_param", parallel.offload_parameters),
    ):
        if target != "none":
            section[key] = {"device": target, "pin_memory": on_gpu}
            if target == "nvme":
                section[key]["nvme_path"] = parallel.nvme_path
    return section
