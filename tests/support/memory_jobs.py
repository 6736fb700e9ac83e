"""Memory that an engine allocates, for comparison with `megavis plan`."""

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.runtime.pipe.schedule import ReduceTiedGrads
from full_objects import with_full_objects
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megavis.composition.instances import Instances
from megavis.composition.model import Model
from megavis.composition.tokens import Vocabulary
from megavis.composition.tokens import blank_batch as blank_images
from megavis.composition.trainable import Trainable
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.data.loading.loader import Batch
from megavis.papers import build_objective
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.planning.frozen_networks import frozen_networks
from megavis.planning.measured_activations import activations_of_layouts
from megavis.planning.meta_device import LiveStorages, num_bytes, place_of, saved_tensors
from megavis.planning.shape import shape_of
from megavis.planning.states import BUCKET, SMALLEST_BUCKET
from megavis.training.engine import Engine


def measure_shape(launch: Launch, path: str, overrides: list[str]):
    """Return the shape of a model for the config's layout, computed on one process."""
    config = read(path, overrides)
    activations = activations_of_layouts([config])
    context = open_context(launch, device="cpu")
    try:
        objective = build_objective(config, context)
        frozen, _ = frozen_networks(objective.frozen_encoders)
        return replace(shape_of(objective, activations), frozen=frozen)
    finally:
        close_context()


def read(path: str, overrides: list[str]):
    """Return a config without dropout, with which CPU attention would store its scores."""
    config = load_config(path, overrides).config
    return config.model_copy(update={"model": config.model.without_dropout()})


def allocated_memory(launch: Launch, path: str, overrides: list[str]) -> tuple[int, int]:
    """Return the bytes of all states after a backward pass, and of a micro-batch's activations."""
    before = live_storages()
    with engine_of(launch, read(path, overrides)) as engine:
        batch = blank_batch(engine)
        engine.train_step(itertools.repeat(batch), 0)  # Adam's states exist from here on
        saved = _backward_of_one(engine, batch)
        return _settled(before), saved


def _settled(before: dict[int, torch.UntypedStorage]) -> int:
    """Return `live_storages(before)` once it has not fallen for a second.

    A thread of gloo frees the buffers of a collective some time after it has ended.
    """
    least, end = live_storages(before), time.monotonic() + 1.0
    while time.monotonic() < end:
        time.sleep(0.1)
        now = live_storages(before)
        if now < least:
            least, end = now, time.monotonic() + 1.0
    return least


def pipeline_memory(launch: Launch, path: str, overrides: list[str]) -> int:
    """Return the bytes held after a step's passes."""
    before, held = live_storages(), []
    with engine_of(launch, read(path, overrides)) as engine:
        batches = itertools.repeat(blank_batch(engine))
        engine.train_step(batches, 0)

        def after_passes(pipeline) -> None:
            held.append(live_storages(before))

        instructions = engine.deepspeed._INSTRUCTION_MAP
        engine.deepspeed._INSTRUCTION_MAP = {**instructions, ReduceTiedGrads: after_passes}
        engine.train_step(batches, 1)
    return held[0]


def peak_memory(launch: Launch, path: str, overrides: list[str]) -> int:
    """Return the peak bytes allocated in a step, without gradients of parameters."""
    with engine_of(launch, read(path, overrides)) as engine:
        batches = itertools.repeat(blank_batch(engine))
        engine.train_step(batches, 0)
        with Live([parameter for _, parameter in engine.layers.named_parameters()]) as live:
            engine.train_step(batches, 1)
        return live.most + _receiving(engine.deepspeed)


def _receiving(engine) -> int:
    """Return the bytes of a pipeline engine's receive buffers, allocated in the first step."""
    buffers = (getattr(engine, name, None) for name in ("pipe_recv_buf", "grad_layer"))
    return sum(buffer.nbytes for buffer in tree_leaves([*buffers]) if buffer is not None)


@contextlib.contextmanager
def engine_of(launch: Launch, config: RunConfig) -> Iterator[Engine]:
    """Open an engine for a config's layout."""
    context = open_context(launch, config.parallel, device="cpu")
    try:
        objective = build_objective(config, context)
        if config.objective.name == "givt_encoder_decoder" and not _encodes(objective):
            # The VAE of the preset is not at hand, so return latents without it.
            shape = objective.reads.shape
            objective.reads.of = lambda samples, index=None: torch.zeros(len(samples), *shape)
        yield Engine(objective)
    finally:
        close_context()


def blank_batch(engine: Engine) -> Batch:
    """Return a micro-batch, of images if there is a frozen network to encode them.

    Without a tokenizer, models of ids read ids. Of detection, one whose losses take all the regions
    that they may.
    """
    objective, device = engine.objective, torch.device("cpu")
    if isinstance(objective, Instances):
        return with_full_objects(objective.blank_batch(engine.micro_batch_size, device))
    if not _encodes(objective):
        batch = objective.blank_batch(engine.micro_batch_size, device)
        if isinstance(objective, Model) and isinstance(objective.reads, Vocabulary):
            batch = replace(batch, inputs=objective.reads.blank(batch.inputs))
        return batch
    side = objective.config.data.image_size
    return blank_images(engine.micro_batch_size, (side, side, 3), torch.uint8, device)


def _encodes(objective: Trainable) -> bool:
    return any(Path(encoder.run_folder).exists() for encoder in objective.frozen_encoders)


def _backward_of_one(engine: Engine, batch: Batch) -> int:
    """Run a micro-batch that is not the last of its step; return the bytes of saved tensors."""
    sequence = engine.objective.sequence(batch)
    saved, loss = saved_tensors(
        lambda: engine.deepspeed(sequence.inputs, sequence.targets), engine.layers.modules
    )
    size = num_bytes(saved)
    del saved
    engine.deepspeed.backward(loss)
    return size


class Live(LiveStorages):
    """Live storages without the gradients of parameters, which count as states."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self._parameters = parameters

    def record(self) -> None:
        """Note the bytes of live storages without gradients."""
        if self.num_bytes <= self.most:
            return
        gradients = (parameter.grad for parameter in self._parameters)
        places = (place_of(gradient) for gradient in gradients if gradient is not None)
        states = sum(self.sizes.get(place, 0) for place in places)
        self.most = max(self.most, self.num_bytes - states)


def live_storages(before=None):
    """Return all reachable storages by address, or the bytes of those not in `before`.

    Storages without memory, such as those of meta tensors, all have the address 0 and are left out.
    """
    gc.collect()
    # type() instead of isinstance(), which some objects answer with a warning.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    # Gradients become Python objects on first access only.
    tensors += [leaf.grad for leaf in tensors if leaf.is_leaf and leaf.grad is not None]
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if place := storage.data_ptr():
            found[place] = storage
    if before is None:
        # Kept alive, so that no later storage has the address of one of these.
        return found
    # DeepSpeed's reduction bucket is `buffers` in the plan.
    buckets = {size * elements for size in (2, 4) for elements in (BUCKET, SMALLEST_BUCKET)}
    sizes = (storage.nbytes() for place, storage in found.items() if place not in before)
    return sum(size for size in sizes if size not in buckets)
