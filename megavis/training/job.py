"""Start a run: join the job in the config's layout, lock and write the run folder, open the shards.

A config or data that would change a run that is resumed are rejected.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from megavis.checkpoint.format.folder import checkpoints_by_age, remove_partial
from megavis.checkpoint.format.manifest import CheckpointManifest
from megavis.composition.trainable import Trainable
from megavis.config.checks import require_world
from megavis.config.errors import NOT_ALLOWED, UserError, blame, counted
from megavis.config.load import dump_config, load_config
from megavis.config.schema import RunConfig, TrainingConfig
from megavis.config.section import DataConfig, ParallelConfig, Section
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform
from megavis.data.format.files import write_atomically
from megavis.data.format.folder_lock import SILENCE_SECONDS, FolderLock
from megavis.data.format.manifest import PALETTE_NAME
from megavis.data.loading.blended_dataset import BlendedDataset, Samples
from megavis.data.loading.dataset import ShardDataset, subset_per_class
from megavis.grammar.compose import in_same_words
from megavis.model.kernel_compiler import require_compiled
from megavis.model.kernels import choose_kernels, chosen_kernels
from megavis.parallel.context import ParallelContext, close_context, end_engines, open_context
from megavis.parallel.device import choose_device, select_device
from megavis.parallel.launch import Launch
from megavis.tokenizers.palette import Palette
from megavis.training.faults.interruption import is_automatic
from megavis.training.faults.watchdog import collective_timeout
from megavis.training.provenance import record_start

_FP8_CAPABILITY = (8, 9)


@contextlib.contextmanager
def open_job(
    config: RunConfig, launch: Launch, *, device: str | None = None
) -> Iterator[ParallelContext]:
    """Join the launcher's job in the config's layout, and leave it at the end.

    Args:
        launch: this process's place in the job.
        device: `cpu` or `cuda`; default: the best available.

    Raises:
        UserError: the config does not fit the number of processes or the device.
    """
    require_world(config, launch.world_size)
    _order_launches(config.parallel)
    place = choose_device(device, local_rank=launch.local_rank)
    select_device(place)
    _require_precision(config.training)
    _require_engine(config.training, place)
    parallel, training = config.parallel, config.training
    with contextlib.ExitStack() as closing:
        closing.callback(choose_kernels, chosen_kernels())
        choose_kernels(training.kernels)
        context = open_context(
            launch,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            device=device,
            timeout_seconds=collective_timeout(training.hang_timeout),
            tf32=training.tf32,
            deterministic=training.deterministic,
        )
        closing.callback(close_context)
        require_compiled(context)
        yield context
        end_engines()  # Not after a failure: ending one waits for its device.


def _order_launches(parallel: ParallelConfig) -> None:
    """Make a GPU start kernels in the order in which they are issued, with a tensor group.

    Megatron-Core issues a collective before the matrix product that it overlaps with, and relies on
    this order, up to Hopper. Not under ZeRO-3, whose gathers are issued after the layer before. A
    variable that is set is kept. CUDA reads it when it starts, so this comes first.
    """
    if parallel.tensor_model_parallel_size > 1 and parallel.zero_stage < 3:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _require_precision(training: TrainingConfig) -> None:
    """Reject a precision that the device does not support, before anything is started."""
    if training.precision != "fp16":
        return
    # DeepSpeed rejects it too, but later and without naming the key.
    if not get_accelerator().is_fp16_supported():
        text = "fp16 needs a GPU, or a CPU that supports it; the nearest choice here is bf16"
        raise UserError(text, key="training.precision")


def _require_engine(training: TrainingConfig, device: torch.device) -> None:
    """Reject Transformer Engine, or FP8, on a device that does not support it."""
    if training.kernels != "transformer_engine":
        return
    if device.type != "cuda":
        text = f"transformer_engine needs a GPU, and the device is {device.type}; use auto here"
        raise UserError(text, key="training.kernels")
    capability = torch.cuda.get_device_capability(device)
    if training.fp8 and capability < _FP8_CAPABILITY:
        text = "needs a GPU of compute capability 8.9 or newer (Ada, Hopper or Blackwell), not"
        found = ".".join(map(str, capability))
        raise UserError(f"{text} {found}; use false here", key="training.fp8")


@contextlib.contextmanager
def hold_run(run_folder: Path, context: ParallelContext) -> Iterator[None]:
    """Hold the lock of a run folder; called on every process of the job.

    Raises:
        UserError: on every process, if another job holds it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            # A scheduler may restart before the last process of the previous job has ended.
            patience = SILENCE_SECONDS if is_automatic(os.environ) else 0.0
            with permissions_needed(f"{run_folder} cannot be written"):
                stack.enter_context(FolderLock(run_folder, patience=patience))

        context.on_main(lock)
        yield


@contextlib.contextmanager
def permissions_needed(what: str | None = None) -> Iterator[None]:
    """Raise UserError where the block may not read or write: no launcher should try it again.

    For what comes before the first step. A disk that turns read-only later is not a user's mistake.
    The message names `what` instead of the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_ALLOWED:
            raise
        raise UserError(f"{what or error.filename}: {error.strerror}") from error


def open_data(
    data: DataConfig, key: str, path: str, transform: Transform, objective: Trainable
) -> ShardDataset:
    """Open a shard folder.

    Args:
        key: the config key that names the folder.
        objective: defines which shards it needs.

    Raises:
        UserError: names the key.
    """
    with blame("data.palette"):
        palette = Palette.load(data.palette) if data.palette else None
    with blame(key):
        dataset = ShardDataset(
            path,
            transform,
            cache=data.cache,
            palette=palette,
            window_shards=data.window_shards,
        )
    what = f"{path}, read with data.palette," if palette else path
    complaints = [(key, f"{what} {text}") for text in objective.check_data(dataset.manifest)]
    missing = dataset.num_unlabelled if objective.backbone.needs_labels else 0
    if missing and not complaints:
        found = counted(missing, "sample")
        text = f"{path} holds {found} without a label, of {len(dataset)} in all"
        complaints.append((key, f"{text}, and this model has no embedding for them"))
    if complaints:
        raise UserError.of(complaints)
    return dataset


def open_training_data(config: RunConfig, objective: Trainable) -> Samples:
    """Open the shard folder of `data.train`, or blend several; see `open_data`."""
    data = config.data
    with blame("data.background_noise"):
        transform = training_transform(data, seed=config.seed)
    if isinstance(data.train, str):
        dataset = open_data(data, "data.train", data.train, transform, objective)
        if data.images_per_class is None:
            return dataset
        with blame("data.images_per_class"):
            return subset_per_class(dataset, data.images_per_class, seed=config.seed)
    parts = [_open_source(config, place, objective) for place in range(len(data.train))]
    with blame("data.train"):
        return BlendedDataset(parts, [source.weight for source in data.train])


def _open_source(config: RunConfig, place: int, objective: Trainable) -> ShardDataset:
    """Open one of several training folders, with its own crop if it has one."""
    data = config.data
    source, where = data.train_sources[place], f"data.train.{place}"
    transform = training_transform(data, seed=config.seed, crop=source.crop)
    try:
        return open_data(data, f"{where}.path", source.path, transform, objective)
    except UserError as error:
        if source.crop is None:
            raise
        # Name the key that has the crop of this folder.
        raise UserError.of(
            (key, text.replace("data.crop", f"{where}.crop")) for key, text in error.issues
        ) from error


def open_held_out(
    data: DataConfig, key: str, path: str, objective: Trainable, train: Samples
) -> ShardDataset:
    """Open held-out images; also raises if their tokenizer differs."""
    dataset = open_data(data, key, path, evaluation_transform(data), objective)
    if dataset.manifest.identity != train.manifest.identity:
        kind = train.manifest.tokenizer_name
        text = f"{path} was made with another {kind} than {train.directory}"
        raise UserError(text, key=key)
    return dataset


def prepare_folder(
    config: RunConfig,
    objective: Trainable,
    train: Samples,
    first_step: int,
    context: ParallelContext,
) -> None:
    """Write config and palette to the run folder, and record the start; on the main process."""
    folder, steps = Path(config.folder), config.training.steps
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial(folder)
    if first_step >= steps:
        taken = f"it has taken {counted(first_step, 'step')}, and training.steps is {steps}"
        sys.stderr.write(f"{folder} is finished: {taken}; raise it to train further\n")
    elif (warning := config.objective.warning(config)) and not (
        config.finetune or config.training.sample_every  # which is refused for this reason
    ):
        sys.stderr.write(f"WARNING: {warning}\n")
    if config.parallel.pipeline_model_parallel_size > 1 and config.parallel.zero_stage > 1:
        sys.stderr.write(
            f"WARNING: pipeline stages with parallel.zero_stage {config.parallel.zero_stage} are"
            " experimental: they rely on private parts of DeepSpeed; use zero_stage 1\n"
        )
    # A finished run keeps the config that it was trained with; fine-tuning may evaluate anew.
    if first_step < steps or config.finetune is not None:
        write_atomically(folder / "config.yaml", dump_config(config).encode())
    palette = Path(config.data.palette or train.directory / PALETTE_NAME)
    if palette.exists():
        write_atomically(folder / PALETTE_NAME, palette.read_bytes())
    device, likelihood = context.device, objective.likelihood
    facts = {
        "processes": context.world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "likelihood": None if likelihood is None else asdict(likelihood),
    }
    record_start(folder, first_step, **facts)


def check_patience(config: RunConfig, objective: Trainable) -> None:
    """Raise UserError if pre-training is to stop by an accuracy that it does not measure."""
    if config.training.patience and not objective.measures_accuracy:
        raise UserError(
            f"{config.objective.name} measures no accuracy in pre-training; set it to 0",
            key="training.patience",
        )


def check_same_data(
    config: RunConfig, manifest: CheckpointManifest, data: Samples, tokenizer: str | None
) -> None:
    """Compare tokenizer and training data with a checkpoint's, by SHA-256.

    Raises:
        UserError: they differ; other data of the same tokenizer is allowed by `data.may_change`.
    """
    before = manifest.tokenizer
    if before != tokenizer:
        raise UserError(
            f"{data.directory}: its {data.manifest.tokenizer_name} {str(tokenizer)[:12]} is not the"
            f" one of the run's step {manifest.step}, {str(before)[:12]}; use the one that the run"
            " was started with, or choose another name"
        )
    if manifest.data in (None, data.manifest.content) or config.data.may_change:
        return
    folders = ", ".join(source.path for source in config.data.train_sources)
    raise UserError(
        f"data.train: {folders} with {counted(data.manifest.num_samples, 'image')} is not the data"
        f" that the run's step {manifest.step} was trained on, on which its sample order depends;"
        " use that data, choose another name, or allow it with data.may_change=true"
    )


def check_earlier_run(config: RunConfig) -> None:
    """Compare a config with the run in its folder, if there is one.

    Raises:
        UserError: see `check_same_run`.
    """
    folder = Path(config.folder)
    if checkpoints_by_age(folder):
        check_same_run(folder / "config.yaml", config)


def check_same_run(path: Path, config: RunConfig) -> None:
    """Compare a config with the one that a run was started with, `path`.

    Raises:
        UserError: they differ in something that affects weights, samples or draws.
    """
    before = load_config(path).config
    if before.drop_path == config.drop_path:
        # Set explicitly, or taken from the model: the same rate.
        before, config = _without_own_drop_path(before), _without_own_drop_path(config)
    before, config = in_same_words(before, config)
    for key in ("seed", "objective", "model", "finetune"):
        old, new = getattr(before, key), getattr(config, key)
        if old != new:
            raise UserError(
                f"{path}: this run was started with {_first_difference(key, old, new)}; choose"
                " another name, or restore the value"
            )
    new_values = _order_keys(config)
    for key, value in _order_keys(before).items():
        if new_values[key] != value:
            raise UserError(
                f"{path}: this run was started with {key} {'null' if value is None else value}, on"
                " which its sample order depends; restore the value, or choose another name"
            )


def _order_keys(config: RunConfig) -> dict[str, Any]:
    """Return what the sample order depends on, besides the seed and the size of the data."""
    data = config.data
    return {
        "training.batch_size": config.training.batch_size,
        "data.train weights": [source.weight for source in data.train_sources],
        "data.repeats": data.repeats,
        "data.images_per_class": data.images_per_class,
        "data.window_shards": data.window_shards,
    }


def _without_own_drop_path(config: RunConfig) -> RunConfig:
    if config.finetune is None:
        return config
    finetune = config.finetune.model_copy(update={"drop_path": None})
    return config.model_copy(update={"finetune": finetune})


def _first_difference(key: str, old: Any, new: Any) -> str:
    """Describe the first key of a section that differs, with its old and new value."""
    if not (isinstance(old, Section) and isinstance(new, Section)):
        return f"{key} {old}, not {new}" if isinstance(old, int) else f"another {key!r}"
    for name in type(old).model_fields:
        if name not in type(new).model_fields:  # another kind of section
            return f"{key}.{name} {getattr(old, name)}, not without it"
        one, other = getattr(old, name), getattr(new, name)
        if one != other and isinstance(one, Section) and isinstance(other, Section):
            return _first_difference(f"{key}.{name}", one, other)
        if one != other:
            return f"{key}.{name} {one}, not {other}"
    return f"another {key!r}"
