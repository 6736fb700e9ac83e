"""One training engine over DeepSpeed's two: the ordinary one and the pipeline one.

Both run the same list of layers. Only this file and the experimental `zero_pipeline.py` handle the
differences: which process holds which layers, and how a step is run.

DeepSpeed's pipeline calls `backward` on each floating-point tensor that a stage has sent, which
would run shared parts, such as an encoder whose memory is carried, once per tensor;
`with_one_backward` prevents that.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups, set_z3_leaf_module
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from megavis.checkpoint.format.manifest import LossScale
from megavis.checkpoint.state.parameter_states import ParameterStates
from megavis.composition.trainable import Trainable
from megavis.config.schema import RunConfig
from megavis.data.loading.loader import Batch
from megavis.model.core import Block
from megavis.model.layer_state import PackedState
from megavis.model.stack import LayerPlan, LayerStack, LocalLayers, build_layers
from megavis.parallel.context import ModelParallelUnit, ParallelContext, end_with_job
from megavis.parallel.device import DTYPES
from megavis.parallel.random import derive_seed
from megavis.planning.parameters import stage_bounds
from megavis.training.deepspeed_config import deepspeed_config
from megavis.training.optimizer import GradientNorm, WeightAverage, build_optimizer, learning_rate
from megavis.training.partial_gradients import sum_partial_gradients
from megavis.training.zero_pipeline import open_zero_pipeline


class Engine:
    """A model in training: steps, evaluation forward passes, and its parameters by name.

    Attributes:
        layers: the layers that this process holds.
        deepspeed: DeepSpeed's engine.
        states: weights and optimizer states by parameter, for checkpoints.
        forward_clock: times forward passes; not with pipeline stages.
    """

    def __init__(self, objective: Trainable) -> None:
        self.objective = objective
        self.config, self.context = config, context = objective.config, objective.context
        self._pipelined = context.pipeline.size > 1
        self.forward_clock = ForwardClock(context.device)
        self._pace = Pace(context.device)
        plans = objective.layer_plans()
        settings = deepspeed_config(
            config,
            context.data.size,
            carries_gradient=objective.backbone.carries_gradient,
            on_gpu=context.device.type == "cuda",
        )
        self.accumulation_steps: int = settings["gradient_accumulation_steps"]
        self.micro_batch_size: int = settings["train_micro_batch_size_per_gpu"]
        module = self._pipeline(plans) if self._pipelined else build_stack(objective)
        self.layers = self._local_layers(plans, module)
        optimizer = build_optimizer(
            (parameter for _, parameter in self.layers.named_parameters()),
            config.optimizer,
            stages=context.pipeline.group if self._pipelined else None,
            parts=context.replicas.group if config.parallel.zero_stage else None,
            tensor=context.tensor.group if context.tensor.size > 1 else None,
            device=context.device,
            kernels=config.training.kernels,
        )
        self.deepspeed = self._open(module, optimizer, settings)
        end_with_job(self.deepspeed.destroy)
        # Before the norm is computed, which counts replicated gradients once.
        sum_partial_gradients(
            self.deepspeed.optimizer,
            (parameter for _, parameter in self.layers.named_parameters()),
            config.parallel,
            context.tensor.group,
        )
        self._norm_of_zero_0: GradientNorm | None = None
        if config.parallel.zero_stage == 0:
            self._norm_of_zero_0 = GradientNorm(
                optimizer, context.model.group, config.optimizer.gradient_clipping
            )
        # The pipeline's timers keep two events per step until printed, which never happens here.
        self.deepspeed.timers = NoopTimer()
        decay = config.optimizer.ema_decay
        self.states = ParameterStates(
            self.deepspeed,
            self.layers,
            context,
            zero_stage=config.parallel.zero_stage,
            averages=decay > 0,
        )
        # After DeepSpeed's first use of the optimizer, which is not a training step.
        self._average = WeightAverage(decay, self.states) if decay else None

    def _open(self, module: Any, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> Any:
        if self._pipelined and self.config.parallel.zero_stage > 1:
            return open_zero_pipeline(module, optimizer, settings)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=settings,
            # With a pipeline DeepSpeed rejects an mpu: the module creates its own groups from the
            # topology.
            mpu=None if self._pipelined else ModelParallelUnit(self.context),
            dist_init_required=False,
        )
        return engine

    def evaluated(self) -> contextlib.AbstractContextManager[None]:
        """Use the EMA of the weights, if there is one, within the block.

        Called on every process.
        """
        return self._average.in_place() if self._average else contextlib.nullcontext()

    def _pipeline(self, plans: list[LayerPlan]) -> nn.Module:
        topology = PipeModelDataParallelTopology(
            num_pp=self.context.pipeline.size,
            num_mp=self.context.tensor.size,
            # DeepSpeed has no context axis. It varies faster than the data axis, so the two are
            # passed as one axis.
            num_dp=self.context.replicas.size,
        )
        built = _partitioner(self.config, self.context)
        bounds = stage_bounds(plans, self.context.pipeline.size)
        # One entry per stage: DeepSpeed's own partitioning ignores the workload of layers.
        stages = [
            LayerSpec(Stage, plans[start:stop], built, is_last=stop == len(plans))
            for start, stop in pairwise(bounds)
        ]
        return PipelineModule(
            stages, topology=topology, loss_fn=self.objective.loss, partition_method="uniform"
        )

    def _local_layers(self, plans: list[LayerPlan], module: Any) -> LocalLayers:
        if not self._pipelined:
            return LocalLayers(plans, list(module.layers))
        pipeline = self.context.pipeline
        first, stop = stage_bounds(plans, pipeline.size)[pipeline.rank : pipeline.rank + 2]
        (own,) = module.forward_funcs
        return LocalLayers(plans[first:stop], list(own.layers))

    def train_step(self, batches: Iterator[Batch], step: int) -> Tensor:
        """Take one optimizer step on the next `accumulation_steps` micro-batches.

        Returns:
            The mean loss over all images of the step on this data-parallel rank's share, a scalar
            on the device; reading it waits for the device.
        """
        # Set from the step number alone, in each step: a scheduler would have state to save.
        rate = self.rate(step)
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = rate * group["learning_rate_scale"]
        self.deepspeed.train()
        self._seed_dropout(step)
        loss = self._step(batches, step)
        self._pace.keep()
        return loss

    def _step(self, batches: Iterator[Batch], step: int) -> Tensor:
        if self._pipelined:
            return self.deepspeed.train_batch(self._pairs(batches, step)).detach()
        total = torch.zeros((), device=self.context.device)
        for _ in range(self.accumulation_steps):
            with self.forward_clock.running():
                inputs, targets = next(self._pairs(batches, step))
                loss = self.deepspeed(inputs, targets)
            self.deepspeed.backward(loss)
            # Called after each micro-batch: DeepSpeed counts them, and steps after the last.
            self.deepspeed.step()
            # Losses are averaged here, gradients by `backward`, which divides each loss by the
            # number of micro-batches.
            total += loss.detach()
        return total / self.accumulation_steps

    def _seed_dropout(self, step: int) -> None:
        """Seed torch by step, so a resumed run needs no generator state.

        Processes of a tensor group use the same mask on the same activations; on split ones, layers
        draw independently (`rank_local_rng`). Those of a context group hold different tokens.
        """
        if not self.config.has_dropout:
            return
        context = self.context
        place = [context.data.rank, context.pipeline.rank]
        if context.context.size > 1:
            place.append(context.context.rank)
        torch.manual_seed(derive_seed(self.config.seed, "dropout", step, *place) & (2**63 - 1))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(
            step,
            peak=self.config.optimizer.learning_rate,
            total_steps=self.config.training.steps,
            config=self.config.schedule,
        )

    def mean_over_data(self, value: Tensor) -> float:
        """Average a scalar over the data-parallel ranks and read it."""
        # All processes of a tensor or context group have the loss over all tokens.
        value = value.detach().float().clone()
        # With stages, DeepSpeed has already averaged the loss and sent it to all of them.
        if not self._pipelined:
            dist.all_reduce(value, group=self.context.data.group)
            value /= self.context.data.size
        return float(value)

    def gradient_norm(self) -> float:
        """Return the global gradient norm of the last step, before clipping."""
        if self._norm_of_zero_0 is not None:
            return float(self._norm_of_zero_0.value)
        return float(self.deepspeed.get_global_grad_norm())

    def last_step_was_skipped(self) -> Tensor:
        """Return 1 if the last step was skipped for non-finite gradients, else 0.

        A scalar on the device, computed without synchronization.
        """
        if self._norm_of_zero_0 is not None:
            return (~self._norm_of_zero_0.value.isfinite()).float()
        skipped = float(self.deepspeed.optimizer.overflow)
        return torch.full((), skipped, device=self.context.device)

    def loss_scale(self) -> LossScale | None:
        """Return the state of fp16's dynamic loss scale; None in other precisions."""
        if self.config.training.precision != "fp16":
            return None
        scaler = self.deepspeed.optimizer.loss_scaler
        return LossScale(
            scale=scaler.cur_scale,
            iteration=scaler.cur_iter,
            last_overflow=scaler.last_overflow_iter,
            hysteresis=scaler.cur_hysteresis,
        )

    def restore_loss_scale(self, saved: LossScale | None) -> None:
        """Continue with the loss scale of a checkpoint."""
        if saved is None or self.config.training.precision != "fp16":
            return
        scaler = self.deepspeed.optimizer.loss_scaler
        scaler.cur_scale, scaler.cur_iter = saved.scale, saved.iteration
        scaler.last_overflow_iter, scaler.cur_hysteresis = saved.last_overflow, saved.hysteresis

    def _pairs(self, batches: Iterator[Batch], step: int) -> Iterator[tuple[Any, Any]]:
        while True:
            batch = next(batches).to(self.context.device, non_blocking=True)
            # The trainer's step, not the loader's: after a rollback, data is skipped but steps are
            # not.
            sequence = self.objective.training_sequence(replace(batch, step=step))
            yield sequence.inputs, sequence.targets


def build_stack(objective: Trainable) -> LayerStack:
    """Build all layers; under ZeRO-3 each is partitioned as soon as it is built.

    No process ever holds more of the model than its share and one layer.
    """
    built = _partitioner(objective.config, objective.context)
    return LayerStack(objective.layer_plans(), objective.loss, built=built)


def _partitioner(config: RunConfig, context: ParallelContext) -> Callable[[nn.Module], object]:
    """Return what to do with each layer as soon as it is built."""
    return (
        _ZeroPartition(config, context) if config.parallel.zero_stage == 3 else lambda layer: None
    )


class _ZeroPartition:
    """Partitions layers over the processes with the same weights for ZeRO-3.

    Layers are built whole and drawn in float32 on the CPU, as in every other layout. Inside
    DeepSpeed's `zero.Init` they would be drawn on the device in the compute precision, which gives
    different weights.
    """

    def __init__(self, config: RunConfig, context: ParallelContext) -> None:
        self._settings = deepspeed_config(
            config, context.data.size, on_gpu=context.device.type == "cuda"
        )
        self._dtype = DTYPES[config.training.precision]
        self._context = context
        self._swapper: Any = None
        # DeepSpeed creates these groups once per process, which may run several jobs.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        self._near: Any = None

    def __call__(self, layer: nn.Module) -> None:
        layer.to(self._context.device)
        if isinstance(layer, Block) and not layer.core.carried_names:
            # Gather all its weights in one call, which halves host time. Not for blocks with inputs
            # besides hidden states: DeepSpeed would free their weights too early.
            set_z3_leaf_module(layer, True)
        for parameter in layer.parameters():
            # Only parameters: buffers, such as a batch norm's statistics, stay float32.
            parameter.data = parameter.data.to(self._dtype)
        split = deepspeed.zero.Init(
            module=layer,
            # The group defines the partitioning of weights, the mpu how batch sizes multiply.
            data_parallel_group=self._context.replicas.group,
            mpu=ModelParallelUnit(self._context),
            config_dict_or_path=self._settings,
            param_swapper=self._swapper,
            zero_param_parallel_group=self._near,
        )
        # Shared by all layers: buffers for offloading to disk, and a group to gather from.
        self._swapper, self._near = split.param_swapper, split.zero_param_process_group


class Stage(nn.Module):
    """The layers of a pipeline stage, built when DeepSpeed builds the stage."""

    def __init__(
        self, plans: Sequence[LayerPlan], built: Callable[[nn.Module], object], *, is_last: bool
    ) -> None:
        """Build the layers; `built` is called with each layer before the next one is built."""
        super().__init__()
        self.layers = build_layers(plans, built)
        self._is_last = is_last

    def forward(self, inputs: PackedState) -> PackedState:
        """Run the layers."""
        state = inputs
        for layer in self.layers:
            state = layer(state)
        return state if self._is_last else with_one_backward(state)


def with_one_backward(outputs: PackedState) -> PackedState:
    """Return the same tensors, such that only the last float runs the stage's backward pass.

    The other floats become leaves that accumulate gradients until then, so the last float's
    backward pass must be called last.
    """
    floats = [] if isinstance(outputs, Tensor) else [t for t in outputs if t.is_floating_point()]
    if len(floats) < 2 or not torch.is_grad_enabled():
        return outputs
    # DeepSpeed calls `backward` on each float that it sent, in order; on a leaf this only
    # accumulates.
    leaves = [tensor.detach().requires_grad_() for tensor in floats[:-1]]
    sent = iter((*leaves, _Last.apply(leaves, *floats)))
    return tuple(next(sent) if tensor.is_floating_point() else tensor for tensor in outputs)


class _Last(torch.autograd.Function):
    """The last of several tensors; its backward pass includes the others'."""

    @staticmethod
    def forward(ctx: Any, leaves: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.leaves = leaves
        return tensors[-1].view_as(tensors[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *(leaf.grad for leaf in ctx.leaves), gradient


class Pace:
    """Keeps the host at most one step ahead of a GPU, which is enough to keep the GPU busy.

    Without it a collective that hangs on the GPU is noticed only when something is read, such as
    the next logged loss: too late for the watchdog's limit on steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._last: Any = None

    def keep(self) -> None:
        """Wait for the end of the step before the one that was just enqueued."""
        if not self._is_cuda:
            return
        end = torch.cuda.Event()
        end.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = end


_KEPT = 256


class ForwardClock:
    """Times this process's forward passes, including their wait for data.

    In plain data parallelism no process waits for another until gradients are reduced, so a slow
    process is visible. On a GPU nothing synchronizes until the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        # Bounded, since a run that logs nothing never reads the clock.
        self._spans: deque[tuple[Any, Any]] = deque(maxlen=_KEPT)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the block."""
        began = self._now()
        yield
        self._spans.append((began, self._now()))

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> float:
        """Return the mean seconds per pass since the last call, 0 without any, and reset."""
        spans = list(self._spans)
        self._spans.clear()
        if not spans:
            return 0.0
        if not self._is_cuda:
            return fmean(end - began for began, end in spans)
        # The events of a stream complete in order.
        spans[-1][1].synchronize()
        return 1e-3 * fmean(began.elapsed_time(end) for began, end in spans)
