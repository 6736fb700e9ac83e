"""ZeRO 2 and 3 with pipeline stages: DeepSpeed's optimizers, called after every micro-batch.

DeepSpeed's pipeline engine refuses both, since it reduces gradients once per step, when each
process still has all of its stage. Here each backward pass ends as it does without stages: the
gradients of the micro-batch are reduced to their owners, which add them up in float32.

A stage runs several forward passes before the first backward pass, and DeepSpeed's ZeRO-3 expects
the two in turn. What follows from that, and is changed here:

- It records in which order modules run, to gather weights ahead, and compares the order between all
  processes. Stages differ, so nothing is recorded: the order is that of the stage's layers, along
  which `gather_ahead.py` gathers.
- A module counts the inputs whose gradients are missing until its weights are released, and a
  forward pass resets the count. So the counts are kept for each micro-batch.
- It counts micro-batches by forward passes, and adds no gradients to those of the first.
- It counts a weight that the tensor group replicates on the first process of tensor group and
  pipeline, so it would miss those of later stages in the gradient norm.
"""

from __future__ import annotations

import contextlib
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.optim import Optimizer

from megavis.training.gather_ahead import BACKWARD, FORWARD, GatherAhead


def open_zero_pipeline(
    module: PipelineModule, optimizer: Optimizer, settings: dict[str, Any]
) -> PipelineEngine:
    """Return a pipeline engine with ZeRO 2 or 3, in place of `deepspeed.initialize`.

    Args:
        module: the stage; under ZeRO-3 its layers are partitioned already.
        optimizer: of its parameters.
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
    """An engine that no longer reports its ZeRO stage once it is built.

    It comes between the pipeline engine and its parent, so that the parent builds the optimizer of
    the stage, and the pipeline engine, which then refuses all but 0 and 1, sees 1.
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
        self._is_hidden = False
        # Backward passes reduce their gradients themselves, as without stages.
        self.enable_backward_allreduce = True
        # By place in the pipeline's buffers; torch's type of a module lacks DeepSpeed's counts.
        self._missing: dict[int, dict[Any, int]] = {}
        self._counting: list[Any] = []
        self._ahead: GatherAhead | None = None
        if self.zero_optimization_stage() == 3:
            self.optimizer.model_parallel_rank = self.mpu.get_slice_parallel_rank()
            coordinator = self.optimizer.parameter_offload.get_param_coordinator()
            coordinator.reset_step = coordinator._clean_inflight_param_registry
            self._counting = [m for m in self.module.modules() if hasattr(m, "post_bwd_fn")]
            self._ahead = GatherAhead(
                self.module.forward_funcs,
                coordinator,
                bucket=self.zero_prefetch_bucket_size(),
                most_live=self.zero_max_live_parameters(),
            )

    def _gathering_ahead(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self._ahead.running(step) if self._ahead else contextlib.nullcontext()

    def _forward_pass(self, buffer_id: int) -> None:
        with self._gathering_ahead(FORWARD):
            self._exec_forward_pass(buffer_id)
        # DeepSpeed creates it in a module's first forward pass with gradients.
        counts = {m: getattr(m, "ds_grads_remaining", 0) for m in self._counting}
        self._missing[buffer_id] = counts

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
