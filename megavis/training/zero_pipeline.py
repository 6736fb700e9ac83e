"""Experimental: ZeRO 2 and 3 with pipeline stages, on private parts of DeepSpeed.

No preset uses it and no plan recommends it: with stages, ZeRO-1 is the first choice. All the code
for it is in this file; docs/architecture.md lists the private names, and a test checks them in the
installed DeepSpeed.

DeepSpeed's pipeline engine rejects both, since it reduces gradients once per step, when each
process still has all gradients of its stage. Here each backward pass ends as it does without
stages: the gradients of the micro-batch are reduced to their owners, which sum them in float32.

A stage runs several forward passes before the first backward pass, whereas DeepSpeed's ZeRO-3
expects the two to alternate. This file therefore changes the following:

- ZeRO-3 records the order in which modules run, to gather weights ahead, and compares it between
  all processes. Stages differ, so nothing is recorded: `GatherAhead` gathers in the order of the
  stage's layers.
- A module counts the inputs whose gradients are missing until its weights are released, and a
  forward pass resets the count. The counts are therefore kept for each micro-batch.
- ZeRO-3 counts micro-batches by forward passes, and does not add gradients to the first one's.
- ZeRO-3 counts a weight that the tensor group replicates only on the first process of tensor group
  and pipeline, so the gradient norm would miss later stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch import nn
from torch.optim import Optimizer

FORWARD, BACKWARD = 1, -1


def open_zero_pipeline(
    module: PipelineModule, optimizer: Optimizer, settings: dict[str, Any]
) -> PipelineEngine:
    """Return a pipeline engine with ZeRO 2 or 3, instead of `deepspeed.initialize`'s.

    Args:
        module: the stage; under ZeRO-3 its layers are partitioned already.
        optimizer: optimizer of its parameters.
        settings: DeepSpeed's config.
    """
    mpu = module.mpu()
    return _ZeroPipelineEngine(
        args=None,
        model=module,
        optimizer=optimizer,
        mpu=mpu,
        dist_init_required=False,
        config=settings,
        config_class=DeepSpeedConfig(settings, mpu),
    )


class _BuiltEngine(DeepSpeedEngine):
    """An engine that hides its ZeRO stage once it is built.

    In the class hierarchy it is between the pipeline engine and its parent: the parent builds the
    optimizer for the true stage, and the pipeline engine, which rejects all but 0 and 1, sees 1.
    """

    _is_hidden = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_hidden = True

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return 1 if self._is_hidden else super().zero_optimization_stage()


class _ZeroPipelineEngine(PipelineEngine, _BuiltEngine):
    """DeepSpeed's pipeline engine for ZeRO 2 and 3."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Only the constructor should see 1: code that reduces gradients asks for the stage again.
        self._is_hidden = False
        # Backward passes reduce their gradients themselves, as without stages.
        self.enable_backward_allreduce = True
        # Indexed by the pipeline's buffer; torch's type of a module lacks DeepSpeed's counts.
        self._missing: dict[int, dict[Any, int]] = {}
        self._counting: list[Any] = []
        self._ahead: GatherAhead | None = None
        if self.zero_optimization_stage() == 3:
            self.optimizer.model_parallel_rank = self.mpu.get_slice_parallel_rank()
            coordinator = self.optimizer.parameter_offload.get_param_coordinator()
            coordinator.reset_step = coordinator._clean_inflight_param_registry
            self._counting = [m for m in self.module.modules() if hasattr(m, "post_bwd_fn")]
            self._ahead = GatherAhead(
                self.module.forward_funcs[0].layers,
                coordinator,
                bucket=self.zero_prefetch_bucket_size(),
                most_live=self.zero_max_live_parameters(),
            )

    def _gathering_ahead(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._ahead.running(step) if self._ahead else contextlib.nullcontext()

    def _forward_pass(self, buffer_id: int) -> None:
        with self._gathering_ahead(FORWARD):
            self._exec_forward_pass(buffer_id)
        # DeepSpeed creates the count in a module's first forward pass with gradients.
        counted = (m for m in self._counting if hasattr(m, "ds_grads_remaining"))
        self._missing[buffer_id] = {m: m.ds_grads_remaining for m in counted}

    def _backward_pass(self, buffer_id: int) -> None:
        for module, count in self._missing.pop(buffer_id).items():
            module.ds_grads_remaining = count
        # It also ends the accounting of the previous backward pass.
        self.optimizer.clear_backward_seen_flag()
        with self._gathering_ahead(BACKWARD):
            self._exec_backward_pass(buffer_id)
            if not self.is_last_stage():
                # The last stage calls `backward` of the engine, which includes this.
                self._backward_epilogue()

    def _reduce_gradients(self) -> None:
        self.optimizer.finalize_gradient_accumulation_boundary()

    def _reduce_tied_gradients(self) -> None:
        """Do nothing: no parameters are shared between stages."""

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.ForwardPass: _forward_pass,
        schedule.BackwardPass: _backward_pass,
        schedule.ReduceGrads: _reduce_gradients,
        schedule.ReduceTiedGrads: _reduce_tied_gradients,
    }


class GatherAhead:
    """Under ZeRO-3, gathers the weights of a stage's next layer while the current one computes.

    Without stages, DeepSpeed gathers ahead along the order of modules that it has recorded. The
    layers of a stage run in the order of its list, and backwards in backward passes, so when the
    first module of a layer asks for its weights, the following layer's are gathered too. All
    processes that share weights hold the same stage, so they issue the same collectives in the same
    order.

    Within a layer, a weight is gathered ahead only if a module has asked for it in an earlier pass
    of the same direction: DeepSpeed gathers weights that are read outside their module when they
    are read, and remembers that it did. Recomputation in a backward pass uses the weights gathered
    ahead. If modules release them afterwards, as blocks with inputs besides hidden states do, they
    are gathered again when needed.

    While a layer computes, the process holds its weights and no more of the next layer's than
    DeepSpeed would gather ahead without stages.
    """

    def __init__(
        self, layers: Sequence[nn.Module], coordinator: Any, *, bucket: int, most_live: int
    ) -> None:
        """Follow the requests for weights.

        Args:
            layers: layers of the stage, partitioned by DeepSpeed.
            coordinator: DeepSpeed's coordinator, which modules ask for their weights.
            bucket: number of parameters of the next layer to gather ahead, not counting those that
                DeepSpeed calls persistent.
            most_live: the same limit for both layers together.
        """
        self._place = {
            module: place for place, layer in enumerate(layers) for module in layer.modules()
        }
        # DeepSpeed's attributes of parameters are unknown to torch's types.
        self._asked: dict[int, list[set[Any]]] = {
            step: [set() for _ in layers] for step in (FORWARD, BACKWARD)
        }
        self._room = [
            min(bucket, most_live - sum(_size(each) for each in layer.parameters()))
            for layer in layers
        ]
        self._fetch = coordinator.fetch_sub_module
        coordinator.fetch_sub_module = self._fetch_sub_module
        self._step = 0
        self._handles: dict[int, list[Any]] = {}
        self._gathered: list[Any] = []

    @contextmanager
    def running(self, step: int) -> Iterator[None]:
        """Gather ahead in a pass over all layers, `FORWARD` or `BACKWARD`."""
        self._step = step
        try:
            yield
        finally:
            self._step = 0
        # Weights that no module has asked for in this pass.
        for place in [*self._handles]:
            self._wait(place)
        for parameter in self._gathered:
            is_whole = parameter.ds_status is ZeroParamStatus.AVAILABLE
            if is_whole and not parameter.ds_active_sub_modules:
                parameter.partition()
        self._handles, self._gathered = {}, []

    def _fetch_sub_module(self, module: nn.Module, forward: bool) -> None:
        """Do what DeepSpeed's function of this name does, and gather ahead."""
        place = self._place.get(module)
        if not self._step or place is None:
            self._fetch(module, forward)
            return
        self._wait(place)
        self._fetch(module, forward)
        asked = self._asked[self._step]
        asked[place].update(iter_params(module, recurse=z3_leaf_module(module)))
        following = place + self._step
        if 0 <= following < len(asked) and following not in self._handles:
            self._handles[following] = self._gather(asked[following], self._room[place])

    @torch.no_grad()
    def _gather(self, parameters: set[Any], room: int) -> list[Any]:
        """Start to gather partitioned parameters in DeepSpeed's order; return what to wait for."""
        # Parameters with and without a secondary partition have different groups.
        chosen: dict[bool, list[Any]] = {}
        for parameter in sorted(parameters, key=lambda each: each.ds_id):
            if room <= 0:
                break
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                room -= _size(parameter)
                has_copy = parameter.ds_secondary_tensor is not None
                chosen.setdefault(has_copy, []).append(parameter)
                self._gathered.append(parameter)
        return [group[0].all_gather_coalesced(group) for _, group in sorted(chosen.items())]

    @torch.no_grad()
    def _wait(self, place: int) -> None:
        """Wait for the weights of a layer; they stay listed for release."""
        for handle in self._handles.get(place, ()):
            handle.wait()
        self._handles[place] = []


def _size(parameter: Any) -> int:
    """Return the number of elements, 0 for persistent parameters."""
    return 0 if parameter.ds_persist else int(parameter.ds_numel)
