"""Parallel layouts: their names, and enumeration of the legal ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from megavis.config.checks import check_config, check_world
from megavis.config.errors import UserError
from megavis.config.finetune_checks import check_finetuning_batch
from megavis.config.schema import ConfigIssue, RunConfig
from megavis.config.section import ParallelConfig

LayoutKey = tuple[int, int, bool, str]
"""How a layer runs: tensor and context size, sequence parallelism, activation checkpointing."""


@dataclass(frozen=True)
class Layout:
    """A `parallel` section on a number of processes.

    Attributes:
        parallel: the section.
        data: data-parallel size.
        micro_batch_size: images per micro-batch and process.
        accumulation_steps: micro-batches of an optimizer step, for each data-parallel process.
    """

    parallel: ParallelConfig
    data: int
    micro_batch_size: int
    accumulation_steps: int

    @classmethod
    def of(cls, config: RunConfig, num_processes: int) -> Layout:
        """Return the config's layout, which must be legal on `num_processes`."""
        parallel, training = config.parallel, config.training
        data = num_processes // parallel.model_parallel_size
        micro = training.micro_batch(data)
        return cls(parallel, data, micro, training.batch_size // (micro * data))

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.parallel.tensor_model_parallel_size

    @property
    def context(self) -> int:
        """Context-parallel size."""
        return self.parallel.context_parallel_size

    @property
    def replicas(self) -> int:
        """Processes with the same weights, over which ZeRO partitions."""
        return self.context * self.data

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages."""
        return self.parallel.pipeline_model_parallel_size

    @property
    def zero_stage(self) -> int:
        """ZeRO stage."""
        return self.parallel.zero_stage

    @property
    def is_experimental(self) -> bool:
        """Whether it relies on private parts of DeepSpeed (`training/zero_pipeline.py`)."""
        return self.pipeline > 1 and self.zero_stage > 1

    @property
    def num_processes(self) -> int:
        """Total number of processes."""
        return self.parallel.model_parallel_size * self.data

    @property
    def name(self) -> str:
        """Name, for example `tp2-pp1-zero3-sp-full-micro4`."""
        return f"{layout_name(self.parallel)}-micro{self.micro_batch_size}"


def layout_key(parallel: ParallelConfig) -> LayoutKey:
    """Return the key of a `parallel` section."""
    sizes = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return *sizes, parallel.sequence_parallel, parallel.activation_checkpointing


def layout_name(parallel: ParallelConfig) -> str:
    """Return a short name, for example `tp2-pp1-zero3-sp-full`."""
    name = f"tp{parallel.tensor_model_parallel_size}"
    if parallel.context_parallel_size > 1:
        name += f"-cp{parallel.context_parallel_size}"
    name += f"-pp{parallel.pipeline_model_parallel_size}-zero{parallel.zero_stage}"
    if parallel.hierarchical_partition_size > 1:
        name += f"-hpz{parallel.hierarchical_partition_size}"
    if parallel.sequence_parallel:
        name += "-sp"
    if parallel.activation_checkpointing != "none":
        name += f"-{parallel.activation_checkpointing}"
    if parallel.offload_optimizer != "none":
        name += "-offload"
    return name


_NAME = re.compile(
    r"tp(?P<tensor>[1-9]\d*)(-cp(?P<context>[1-9]\d*))?-pp(?P<pipeline>[1-9]\d*)-zero(?P<zero>[0-3])"
    r"(-hpz(?P<near>[1-9]\d*))?(?P<sequence>-sp)?(-(?P<recompute>selective|full))?(?P<offload>-offload)?"
)


def layout_called(name: str) -> ParallelConfig:
    """Return the layout that `layout_name` calls by this name.

    Raises:
        UserError: no layout has it.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise UserError(
            f"'{name}' is not the name of a layout; an example is tp2-pp1-zero3 or"
            " tp2-cp2-pp1-zero1-sp-full: tensor size, context size if it is not 1, pipeline size,"
            " ZeRO stage, then hpz and its size, sp (sequence parallelism), selective or full"
            " (activation checkpointing) and offload, as far as they apply"
        )
    return ParallelConfig(
        tensor_model_parallel_size=int(found["tensor"]),
        context_parallel_size=int(found["context"] or 1),
        pipeline_model_parallel_size=int(found["pipeline"]),
        zero_stage=int(found["zero"]),  # type: ignore[arg-type]
        hierarchical_partition_size=int(found["near"] or 1),
        sequence_parallel=found["sequence"] is not None,
        activation_checkpointing=found["recompute"] or "none",  # type: ignore[arg-type]
        offload_optimizer="cpu" if found["offload"] else "none",
    )


def legal_layouts(config: RunConfig, num_processes: int) -> Iterator[ParallelConfig]:
    """Yield every layout of `num_processes` that the config checks accept."""
    sizes = _divisors(num_processes)
    recomputing = ("none", "selective", "full")
    choices = product(sizes, sizes, sizes, (0, 1, 2, 3), (False, True), recomputing)
    for tensor, context, pipeline, zero, sequence, recompute in choices:
        # The config checks would reject these too, but take most of the time of `megavis plan`.
        if num_processes % (tensor * context * pipeline):
            continue
        parallel = ParallelConfig(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            pipeline_model_parallel_size=pipeline,
            zero_stage=zero,  # type: ignore[arg-type]
            sequence_parallel=sequence,
            activation_checkpointing=recompute,  # type: ignore[arg-type]
        )
        if is_legal(with_layout(config, parallel), num_processes):
            yield parallel


def is_legal(config: RunConfig, num_processes: int) -> bool:
    """Return whether the config checks accept `config` on `num_processes`."""
    return not layout_issues(config, num_processes)


def layout_issues(config: RunConfig, num_processes: int) -> list[ConfigIssue]:
    """Return the issues that the config checks find in `config` on `num_processes`."""
    return [*check_config(config), *check_world(config, num_processes)]


def with_layout(config: RunConfig, parallel: ParallelConfig) -> RunConfig:
    """Return the config with another layout."""
    return config.model_copy(update={"parallel": parallel})


def all_layouts(config: RunConfig, num_processes: int) -> Iterator[Layout]:
    """Yield every legal layout with every legal micro-batch size that divides a process's batch."""
    # Use the full share as the micro-batch, so that legality does not depend on the config's.
    plain = config.model_copy(
        update={"training": config.training.model_copy(update={"micro_batch_size": None})}
    )
    for parallel in legal_layouts(plain, num_processes):
        share = Layout.of(with_layout(plain, parallel), num_processes)
        for micro in _divisors(share.micro_batch_size):
            if not any(check_finetuning_batch(config, micro, share.data)):
                yield Layout(parallel, share.data, micro, share.micro_batch_size // micro)


def with_offload(config: RunConfig, layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield the layouts with an offloaded optimizer, where this is legal."""
    for layout in layouts:
        parallel = layout.parallel.model_copy(update={"offload_optimizer": "cpu"})
        micro = {"micro_batch_size": layout.micro_batch_size}
        training = config.training.model_copy(update=micro)
        offloaded = config.model_copy(update={"parallel": parallel, "training": training})
        if is_legal(offloaded, layout.num_processes):
            yield replace(layout, parallel=parallel)


@functools.cache
def _divisors(value: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, value + 1) if value % size == 0)
