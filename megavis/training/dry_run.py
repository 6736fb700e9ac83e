"""Check on one process that a job of any size can start.

One process stands in for the last of N: groups have the job's sizes without communication, and
layers are on the meta device. Data, disk and checkpoints are checked in place.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megavis.checkpoint.format.folder import checkpoints_by_age
from megavis.checkpoint.format.manifest import read_manifest
from megavis.composition.trainable import Trainable
from megavis.config.checks import require_world
from megavis.config.errors import UserError, counted
from megavis.config.places import nearest_folder, refusal
from megavis.config.schema import RunConfig
from megavis.data.loading.blended_dataset import BlendedDataset
from megavis.data.loading.needs import data_needs, needs_lines
from megavis.model.parameters import partition_dimension
from megavis.parallel.context import close_context, open_virtual_context
from megavis.parallel.limits import allowed_open_files
from megavis.planning.layouts import Layout, layout_name
from megavis.planning.states import FLOAT32, MOMENTS
from megavis.training.run_folder import (
    check_earlier_run,
    check_same_origin,
    warning_of_average,
)
from megavis.training.trainer import Trainer

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class DryRunCheck:
    """Result of one check.

    Attributes:
        topic: what was checked.
        is_right: whether the job can start.
        text: finding; on failure, how to fix it.
        error: what was raised, if anything.
    """

    topic: str
    is_right: bool
    text: str
    error: UserError | None = None

    @classmethod
    def of(cls, topic: str, error: UserError) -> DryRunCheck:
        """Return the check that failed with an error."""
        return cls(topic, False, str(error), error)

    def __str__(self) -> str:
        return f"{'ok ' if self.is_right else 'NO '} {self.topic}: {self.text}"


def dry_run(config: RunConfig, num_processes: int) -> Iterator[DryRunCheck]:
    """Yield the checks of a job of N processes, in the order of its start."""
    try:
        require_world(config, num_processes)
    except UserError as error:
        yield DryRunCheck.of("layout", error)
        return
    warning = config.objective.warning(config)
    if config.finetune is None and warning is not None:
        yield DryRunCheck("samples", True, warning)
    if (of_average := warning_of_average(config)) is not None:
        yield DryRunCheck("average", True, of_average)
    layout = Layout.of(config, num_processes)
    yield DryRunCheck(
        "layout",
        True,
        f"{layout_name(config.parallel)} on {counted(num_processes, 'process', 'processes')}:"
        f" {layout.data} of data, each {layout.accumulation_steps} × {layout.micro_batch_size}"
        " images per step",
    )
    # The last process has the last stage and the last partition of every matrix.
    context = open_virtual_context(num_processes - 1, num_processes, config.parallel)
    try:
        yield from _with_data(config, layout, Trainer.open(config, context))
    except UserError as error:
        yield DryRunCheck.of("data", error)
    finally:
        close_context()


def _with_data(config: RunConfig, layout: Layout, run: Trainer) -> Iterator[DryRunCheck]:
    yield _data(run, layout)
    yield _needs(run)
    yield _tokenizer(run)
    trained, frozen = _shapes(run.objective, layout.tensor)
    num_trained, num_frozen = (sum(map(math.prod, each.values())) for each in (trained, frozen))
    shapes = trained | frozen
    text = f"{num_trained + num_frozen:,} parameters in {len(shapes)} tensors"
    yield DryRunCheck("model", True, text)
    yield _disk(config, num_trained, num_frozen)
    yield _resume(run, shapes)


def _data(run: Trainer, layout: Layout) -> DryRunCheck:
    data, threads = run.train_data, run.config.data.threads
    shards = len(data.manifest.shards)
    text = f"{counted(len(data), 'training image')} in {counted(shards, 'shard')}"
    if len(data) < run.config.training.batch_size:
        return DryRunCheck("data", False, f"{text}; fewer than training.batch_size")
    readers = layout.data * threads
    if shards < readers:
        text += (
            f" for {readers} readers ({layout.data} data-parallel × {threads} threads): every"
            " process reads from every shard, so none waits, but several share a file"
        )
    return DryRunCheck("data", True, text)


def _needs(run: Trainer) -> DryRunCheck:
    """Report what the training data need of this machine."""
    data = run.train_data
    parts = data.parts if isinstance(data, BlendedDataset) else [data]
    manifests = [part.manifest for part in parts]
    needs = data_needs(run.config.data, manifests, allowed_open_files())
    complaints = list(needs.complaints())
    if complaints:
        return DryRunCheck.of("needs", UserError.of(complaints))
    batch = run.config.training.batch_size
    a_step = (
        f"a step of all nodes reads {batch * needs.bytes_a_sample / 1e6:,.1f} MB and opens"
        f" {batch * needs.opens_a_sample:,.3g} files"
    )
    return DryRunCheck("needs", True, "; ".join([*needs_lines(needs), a_step]))


def _tokenizer(run: Trainer) -> DryRunCheck:
    manifest = run.train_data.manifest
    if manifest.identity is None:
        text = "plain images: none is needed"
        if run.tokenizer is not None:
            text = f"plain images, encoded by a tokenizer of identity {run.tokenizer[:12]}"
        return DryRunCheck("tokenizer", True, text)
    text = f"{manifest.tokenizer_name} {manifest.identity[:12]}"
    also = "the same in validation" if run.task.validation is not None else "no validation shards"
    return DryRunCheck("tokenizer", True, f"{text}, {also}")


def _shapes(objective: Trainable, tensor_size: int) -> tuple[Shapes, Shapes]:
    """Build this rank's part of every layer on the meta device.

    Returns:
        Full shapes by name, of trained parameters and of frozen ones.
    """
    trained: Shapes = {}
    frozen: Shapes = {}
    for plan in objective.layer_plans():
        with torch.device("meta"):
            layer = plan.build()
        for name, parameter in layer.named_parameters():
            shape, dimension = list(parameter.shape), partition_dimension(parameter)
            if dimension is not None:
                shape[dimension] *= tensor_size
            own = trained if parameter.requires_grad else frozen
            own[f"{plan.name}.{name}"] = tuple(shape)
    return trained, frozen


def _disk(config: RunConfig, num_trained: int, num_frozen: int) -> DryRunCheck:
    """Compare the size of checkpoints, including one being written, with free disk space."""
    keep, steps = config.checkpoint, config.training.steps
    # Of frozen parameters only weights are saved.
    kinds = 1 + MOMENTS[config.optimizer.algorithm] + bool(config.optimizer.ema_decay)
    size = FLOAT32 * (kinds * num_trained + num_frozen)
    every = keep.keep_every or steps + 1
    others = {step for step in keep.keep_at if step <= steps and step % every}
    # With rollbacks, regular checkpoints are kept besides as many newest ones, which may differ.
    last = keep.keep_last * (2 if config.training.max_rollbacks else 1)
    count = last + 1 + steps // every + len(others)
    folder = nearest_folder(config.folder / "checkpoints")
    free = shutil.disk_usage(folder).free
    text = (
        f"{count} checkpoints of {size / 1e9:.1f} GB take {count * size / 1e9:.1f} GB;"
        f" {free / 1e9:.1f} GB are free in {folder}"
    )
    if why := refusal(folder):
        text = f"{folder}: nothing can be written there ({why}); name another folder as output"
        return DryRunCheck("disk", False, text)
    if count * size <= free:
        return DryRunCheck("disk", True, text)
    return DryRunCheck("disk", False, f"{text}; lower checkpoint.keep_last, raise keep_every")


def _resume(run: Trainer, shapes: Shapes) -> DryRunCheck:
    """Report where the run would resume, and whether that checkpoint fits the model."""
    try:
        check_earlier_run(run.config)
        folder = run.config.folder
        checkpoint = next(iter(checkpoints_by_age(folder)), None)
        if checkpoint is None:
            return DryRunCheck("resume", True, f"{folder} has no checkpoint: starts at step 0")
        manifest = read_manifest(checkpoint)
        check_same_origin(run.config, manifest, run.train_data, run.tokenizer)
    except UserError as error:
        return DryRunCheck.of("resume", error)
    for name, shape in shapes.items():
        stored = manifest.tensors.get(f"weight/{name}")
        if stored is None or stored.shape != shape:
            has = "no such tensor" if stored is None else f"shape {stored.shape}"
            return DryRunCheck("resume", False, f"{checkpoint}: {name} has {has}, not {shape}")
    for name, entry in manifest.files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != entry.size:
            return DryRunCheck("resume", False, f"{path}: missing, or not of {entry.size} bytes")
    return DryRunCheck("resume", True, f"{checkpoint}: resumes from step {manifest.step}")
