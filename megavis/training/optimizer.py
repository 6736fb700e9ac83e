"""Optimizers, parameter groups, learning-rate schedule, gradient norm and EMA of the weights.

LARS scales the step of each matrix by its norm, for linear evaluation with large batches:
"Large Batch Training of Convolutional Networks" (You, Gitman, Ginsburg), equation 6. MAE's linear
probing, which "Denoising Autoregressive Representation Learning" follows (table 13), excludes
biases from the scaling.

Gradient norms and skipping of non-finite steps are for ZeRO-0, where DeepSpeed does neither.

The EMA, θ̄ ← decay · θ̄ + (1 - decay) · θ after every step, starts from the weights after the first
step. It is another optimizer state, so it is partitioned and offloaded like the master weights at
any ZeRO stage.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megavis.checkpoint.format.manifest import TensorKind
from megavis.checkpoint.state.parameter_states import AVERAGE, ParameterStates, logical_shape
from megavis.config.schema import OptimizerConfig, ScheduleConfig
from megavis.config.section import KernelLibrary
from megavis.model.kernels import apex_part
from megavis.model.parameters import (
    ParamGroupOptions,
    decay_of,
    is_first_copy,
    options_of,
)
from megavis.training.adafactor import Adafactor, Slice, sum_over

_TRUST = 1e-3
"""η of LARS."""


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizerConfig,
    *,
    stages: dist.ProcessGroup | None = None,
    parts: dist.ProcessGroup | None = None,
    tensor: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    kernels: KernelLibrary = "auto",
) -> torch.optim.Optimizer:
    """Return decoupled-decay Adam, Adafactor, SGD or LARS over the trainable parameters.

    Args:
        parameters: all parameters, trained and frozen.
        stages: the pipeline group, whose processes hold different layers.
        parts: the group over which ZeRO partitions optimizer states.
        tensor: the tensor group, if it has several processes.
        device: device on which groups can reduce tensors; None: the device of the states.
        kernels: `apex` takes NVIDIA Apex's Adam, any other torch's.

    Raises:
        UserError: NVIDIA Apex is requested but absent.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sums: dict[str, Any] = {"processes": parts, "device": device}
    # ZeRO flattens a group, and LARS needs the norm of each matrix, Adafactor its rows and columns.
    alone = [group for one in trained for group in parameter_groups([one], config)]
    if config.algorithm in ("sgd", "lars"):
        adapts = config.algorithm == "lars"
        each = [
            {**group, "adapts": adapts and len(logical_shape(group["params"][0])) > 1}
            for group in alone
        ]
        return LARS(each, lr=config.learning_rate, momentum=config.betas[0], **sums)
    groups = parameter_groups(trained, config)
    if stages is not None:
        # ZeRO sums gradient norms over the stages group by group, and would hang on a missing one.
        groups = split_groups(groups, _largest(len(groups), stages))
    elif config.algorithm == "adafactor":
        # ZeRO-3 divides large groups, but a parameter's group stays one.
        groups = alone
    if config.algorithm == "adafactor":
        groups = [{**g, "slices": [Slice.of(p, tensor) for p in g["params"]]} for g in groups]
        rates: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas}
        return Adafactor(groups, **rates, tensor=tensor, **sums)
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": config.betas,
        "eps": config.epsilon,
    }
    if kernels == "apex":
        fused_adam = skipping(apex_part("optimizers", "FusedAdam"))
        # Apex counts steps per group, but only from its first step on; a run resumes before that.
        return fused_adam([{**group, "step": 0} for group in groups], adam_w_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)  # only fused ones honour `found_inf`


def parameter_groups(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Group parameters by optimizer settings.

    First by weight decay (`decays`), then by their declared options.
    `learning_rate_scale` of a group multiplies the scheduled rate.
    """
    weight_decay = config.weight_decay
    groups: dict[tuple[bool, ParamGroupOptions], list[nn.Parameter]] = {}
    for parameter in parameters:
        decayed = bool(weight_decay) and decays(parameter, embeddings=config.decay_embeddings)
        key = (decayed, options_of(parameter))
        groups.setdefault(key, []).append(parameter)
    # Decaying parameters first, regardless of layer order.
    ordered = sorted(groups.items(), key=lambda item: not item[0][0])
    return [
        {
            "params": members,
            "weight_decay": weight_decay if decayed else 0.0,
            "learning_rate_scale": options.learning_rate_scale,
            **({} if options.betas is None else {"betas": options.betas}),
        }
        for (decayed, options), members in ordered
    ]


def decays(parameter: nn.Parameter, *, embeddings: bool = False) -> bool:
    """Return whether weight decay applies: two or more dimensions, and not declared otherwise.

    As in MAE's code, biases and the gains of norms have one dimension. A parameter that ZeRO-3 has
    partitioned counts by its logical shape.

    Args:
        parameter: one of a model's.
        embeddings: embeddings, positions and learned tokens decay too.
    """
    declared = decay_of(parameter)
    if declared is None:
        return len(logical_shape(parameter)) > 1
    return declared == "always" or (embeddings and declared == "as embedding")


def split_groups(groups: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return at least `count` groups, by halving the largest ones."""
    groups = list(groups)
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda place: len(groups[place]["params"]))
        parameters = groups[largest]["params"]
        middle = len(parameters) // 2
        assert middle, "fewer parameters than groups"
        halves = (parameters[:middle], parameters[middle:])
        groups[largest : largest + 1] = [{**groups[largest], "params": half} for half in halves]
    return groups


def _largest(count: int, processes: dist.ProcessGroup) -> int:
    counts: list[Any] = [None] * processes.size()
    dist.all_gather_object(counts, count, group=processes)
    return max(counts)


def skipping(kind: Any) -> Any:
    """Return a subclass of an optimizer that skips steps if `found_inf` is not 0.

    torch's fused optimizers and LARS do so on the device; Apex's ignores it. Here, reading the
    value synchronizes.
    """

    class Skipping(kind):
        @functools.wraps(kind.step)
        def step(self, *args: Any, **options: Any) -> Any:
            # Like torch's optimizers, take every step if `found_inf` is not set.
            if float(getattr(self, "found_inf", 0.0)):
                return None
            return super().step(*args, **options)

    return Skipping


def learning_rate(step: int, *, peak: float, total_steps: int, config: ScheduleConfig) -> float:
    """Return the learning rate of a step, counted from 0: warm-up, then `decay`.

    With a linear warm-up, the rate is peak / warmup_steps at the first step, and at step
    `warmup_steps` is the peak.
    """
    if step < config.warmup_steps:
        rise = peak * (step + 1) / config.warmup_steps
        return rise if config.warmup_rate is None else config.warmup_rate
    if config.decay == "constant":
        halvings = (step - config.warmup_steps) // config.halve_every if config.halve_every else 0
        return peak * 0.5**halvings
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    left = 1.0 - done if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_rate + (peak - config.min_rate) * left


class LARS(torch.optim.Optimizer):
    """Momentum on g' = η ‖w‖ / (‖g‖ + β ‖w‖) · (g + β w), with β the weight decay.

    A group with `adapts` holds one matrix, or this process's share if ZeRO partitions it. Other
    groups hold biases, whose steps are not scaled; with only these, the optimizer is SGD. Each
    group counts its own steps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        processes: dist.ProcessGroup | None,
        device: torch.device | None,
    ) -> None:
        """Set parameters and hyperparameters.

        Args:
            groups: parameters with `weight_decay` and `adapts`.
            momentum: decay of the running sum of steps.
            processes: group over which matrices are partitioned; None if each process has all.
            device: device for sums over processes, from which states may be offloaded; None: the
                device of the states.
        """
        super().__init__(groups, {"lr": lr, "momentum": momentum, "step": 0})
        self.processes, self.device = processes, device

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's may return the closure's loss
        self, closure: Callable[[], float] | None = None
    ) -> None:
        """Take one step; the closure is not called."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        direction = gradient.to(parameter.dtype) + decay * parameter
        if group["adapts"]:
            weight, slope = self._norms(parameter, gradient)
            trust = _TRUST * weight / (slope + decay * weight)
            # A zero matrix, or one without a gradient, takes a plain step.
            direction *= torch.where((weight > 0) & (slope > 0), trust, 1.0)
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = group["momentum"] * state["momentum"] + direction
        # Like torch's optimizers, skip a step that `GradientNorm` found non-finite, and take every
        # step if `found_inf` is not set.
        taken = ~getattr(self, "found_inf", torch.zeros((), device=parameter.device)).bool()
        state["momentum"].copy_(torch.where(taken, momentum, state["momentum"]))
        parameter.copy_(torch.where(taken, parameter - group["lr"] * momentum, parameter))

    def _norms(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the norms of a full matrix and of its gradient, `[2]`."""
        squares = torch.stack([t.float().square().sum() for t in (parameter, gradient)])
        # Not over the tensor group: LARS trains only a classifier, which is replicated in it.
        if self.processes is not None:
            squares = sum_over(self.processes, squares, self.device)
        return squares.sqrt()


class GradientNorm:
    """Computes and clips the global gradient norm just before each optimizer step.

    All parts of a parameter partitioned over the tensor group count, and replicated parameters
    count once. If the norm is not finite, `found_inf` makes the optimizer leave weights and moments
    unchanged: without synchronization in torch's fused optimizers and LARS, through
    `optimizer.skipping` in Apex's.

    Attributes:
        value: the norm of the last step, before clipping, on the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model_group: dist.ProcessGroup, clip: float
    ) -> None:
        self.value: Tensor = torch.zeros(())
        self._group, self._clip = model_group, clip
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        counted = [p.grad for p in parameters if p.grad is not None and is_first_copy(p)]
        device = parameters[0].device
        total = torch.zeros((), device=device)
        if counted:
            total = torch.stack([g.float().pow(2).sum() for g in counted]).sum()
        # Not over the replicas, whose gradients are already equal.
        dist.all_reduce(total, group=self._group)
        self.value = total.sqrt()
        # Optimizers read this attribute, which their type does not declare.
        optimizer.found_inf = (~self.value.isfinite()).float()  # type: ignore[attr-defined]
        if self._clip:
            # The 1e-6 is from torch's `clip_grad_norm_`.
            scale = (self._clip / (self.value + 1e-6)).clamp(max=1.0)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)


class WeightAverage:
    """EMA of the weights, which replaces them during evaluation."""

    def __init__(self, decay: float, states: ParameterStates) -> None:
        self.decay, self.states = decay, states
        states.optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Under ZeRO the optimizer is called for one flat partition after another; under ZeRO-0 it
        # is also called for a non-finite step, which it skips.
        share: Any = 1.0 - self.decay
        if hasattr(optimizer, "found_inf"):
            share = share * (1.0 - optimizer.found_inf)
        for group in optimizer.param_groups:
            for master in group["params"]:
                state = optimizer.state[master]
                if AVERAGE in state:
                    state[AVERAGE].lerp_(master.detach(), share)
                elif state:
                    state[AVERAGE] = master.detach().clone()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the weights within the block. Collective over all processes.

        Before the first step there is no average, and the weights are used. After an exception the
        average stays: other processes do not come to gather the weights with one that has failed.
        """
        if not self.states.has(AVERAGE):
            yield
            return
        self._show(AVERAGE)
        yield
        self._show("weight")

    def _show(self, kind: TensorKind) -> None:
        for _, parameter in self.states.layers.named_parameters():
            if parameter.requires_grad:
                self.states.show(parameter, kind)
