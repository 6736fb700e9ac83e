"""What an engine really allocates, for comparison with what `megavis plan` says."""

import gc
import itertools

import torch

from megavis.config.load import load_config
from megavis.data.batch import Batch
from megavis.objectives import build_objective, objective_configs
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.planning.memory import BUCKET
from megavis.planning.shape import saved_bytes, shape_of
from megavis.training.engine import Engine


def measure_shape(launch: Launch, path: str, overrides: list[str]):
    """Return the shape of a model, on one process."""
    context = open_context(launch, device="cpu")
    try:
        return shape_of(build_objective(read(path, overrides), context))
    finally:
        close_context()


def read(path: str, overrides: list[str]):
    """Return a config without dropout, for which a CPU has no kernel that keeps no scores."""
    config = load_config(path, overrides, objectives=objective_configs()).config
    return config.model_copy(update={"model": config.model.without_dropout()})


def found_memory(launch: Launch, path: str, overrides: list[str]) -> tuple[int, float]:
    """Return the bytes of all states after a backward pass, and what a micro-batch saves."""
    config = read(path, overrides)
    parallel = config.parallel
    context = open_context(
        launch,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        device="cpu",
    )
    try:
        before = live_storages()
        objective = build_objective(config, context)
        engine = Engine(config, objective, context)
        batch = objective.blank_batch(engine.micro_batch_size, torch.device("cpu"))
        engine.train_step(itertools.repeat(batch), 0)  # Adam's states exist from here on
        saved = _backward_of_one(engine, batch)
        return live_storages(before), saved
    finally:
        close_context()


def _backward_of_one(engine: Engine, batch: Batch) -> int:
    """Run both passes of a micro-batch that is not the last of its step; return what was saved."""
    sequence = engine.objective.sequence(batch)
    saved, loss = saved_bytes(
        lambda: engine.deepspeed(sequence.inputs, sequence.targets), engine.layers.modules
    )
    engine.deepspeed.backward(loss)
    return saved


def live_storages(before=None):
    """Return the storages that Python can reach, or the bytes of those that are new."""
    gc.collect()
    # By type(), since isinstance() asks objects that warn when they are asked.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    # A gradient is no object of Python until someone looks at it.
    tensors += [leaf.grad for leaf in tensors if leaf.is_leaf and leaf.grad is not None]
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    if before is None:
        return frozenset(found)
    # DeepSpeed's bucket is allocated whole and hardly touched: `buffers` of the plan.
    buckets = {BUCKET * 2, BUCKET * 4}
    return sum(n for place, n in found.items() if place not in before and n not in buckets)
