"""Stage 5: training speed of the papers' presets on one GPU, and time by kind of work.

To measure another preset or variant, add an entry to `PRESETS` or `VARIANTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from benchmarks.gpu_check.kernels import TimeSplit, seconds_of, synchronize, time_split
from benchmarks.gpu_check.machine import SMALL_IMAGES
from benchmarks.gpu_check.models import TINY, job, read_config
from benchmarks.gpu_check.passes import compilation_row
from benchmarks.gpu_check.planned import planned_time
from benchmarks.gpu_check.results import Measure, Row, Settings
from benchmarks.gpu_check.training import Trainer
from megavis.config.schema import RunConfig
from megavis.model.core import Block
from megavis.model.flops import peak_flops
from megavis.model.kernels import compiles_blocks
from megavis.parallel.launch import Launch


@dataclass(frozen=True)
class Preset:
    """A shipped config on one GPU.

    Attributes:
        path: path of the config.
        images: images per micro-batch.
        words: overrides.
        estimate: roofline estimate of a micro-batch's forward and backward pass in milliseconds.
        anchor: published results for similar models.
    """

    path: str
    images: int
    words: tuple[str, ...] = ()
    estimate: float | None = None
    anchor: str = ""


PRESETS: Mapping[str, Preset] = {
    "iGPT-XL, 6 of 60 blocks": Preset(
        "igpt/xl_64.yaml",
        2,
        ("model.num_layers=6",),
        722 / 10,
        "1B at 2,048 tokens on 128 H100: 40.6 % (llm-foundry)",
    ),
    "GIVT-L": Preset("givt/causal_large.yaml", 16, (), 99, "d12, d18: 41, 46 % (nanochat)"),
    "DARL ViT-H": Preset("darl/vit_h14_diff.yaml", 64, (), 194, "ViT-g/14, 8 H100: 29 % (NeMo)"),
    "GVP-B": Preset("gvp/vit_b_p2p.yaml", 128, (), 70, "ViT-S, one H100: 22.9 %"),
    "MP3-B": Preset("mp3/vit_b_imagenet.yaml", 256, (), None, "ViT-S, one H100: 22.9 %"),
}
"""Presets to measure; a variant's overrides come after the preset's."""


@dataclass(frozen=True)
class Variant:
    """A way to run presets; blocks are compiled whole unless an override says otherwise.

    Attributes:
        zero_stage: ZeRO stage of the run.
        words: further overrides.
        micro_batches: micro-batches per step; several share the time of the optimizer.
    """

    zero_stage: int
    words: tuple[str, ...] = ("parallel.activation_checkpointing=none",)
    micro_batches: int = 1


VARIANTS: Mapping[str, Variant] = {
    "ZeRO-1": Variant(1),
    "ZeRO-1, four micro-batches": Variant(1, micro_batches=4),
    "ZeRO-3": Variant(3),
    "ZeRO-1, regions": Variant(1, (*Variant.words, "training.kernels=regions")),
    "ZeRO-1, full recomputation": Variant(1, ("parallel.activation_checkpointing=full",)),
}
"""Variants to run them in."""


def parts(settings: Settings) -> Mapping[str, Measure]:
    """Return the stage's parts: all presets in the first variant, then in the second, ...

    At tiny sizes only the first preset is run in more than one variant.
    """
    first_preset, first_variant = next(iter(PRESETS)), next(iter(VARIANTS))
    return {
        f"{preset}, {name}": functools.partial(_measure, preset, name)
        for name in VARIANTS
        for preset in PRESETS
        if not settings.small or preset == first_preset or name == first_variant
    }


def config_of(preset: Preset, variant: Variant, settings: Settings) -> RunConfig:
    """Return the config of a preset and variant."""
    images = 2 if settings.small else preset.images
    tiny = (*TINY, *SMALL_IMAGES[preset.path]) if settings.small else ()
    sizes = (
        f"training.batch_size={images * variant.micro_batches}",
        f"training.micro_batch_size={images}",
    )
    stage = f"parallel.zero_stage={variant.zero_stage}"
    words = (*preset.words, "training.precision=bf16", *sizes, stage)
    return read_config(preset.path, [*words, *variant.words, *tiny])


def _measure(name: str, way: str, launch: Launch, settings: Settings) -> list[Row]:
    preset = PRESETS[name]
    config = config_of(preset, VARIANTS[way], settings)
    with job(launch, settings) as context:
        trainer, device = Trainer(config, context), context.device
        for _ in range(1 if settings.small else 3):
            trainer.enqueue()
        synchronize(device)
        # At ZeRO-3 blocks that carry more than hidden states stay plain.
        whole = compiles_blocks(device) and not all(
            each.is_gathered_in_parts
            for layer in trainer.engine.layers.modules
            for each in layer.modules()
            if isinstance(each, Block)
        )
        compiled = compilation_row(f"{name}, {way}", whole=whole)
        if settings.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = seconds_of(trainer.enqueue, device, rounds=1 if settings.small else 10)
        memory = torch.cuda.max_memory_allocated(device) / 1e9 if settings.on_gpu else None
        split = time_split(trainer.enqueue, device, times=1 if settings.small else 3)
        planned = planned_time(trainer.objective, device)
        rate = trainer.engine.config.training.batch_size / seconds
        flops = trainer.objective.flops_per_image()
    title = f"{name}, {way}"
    return [
        Row(
            f"{title}: step",
            1e3 * seconds,
            "ms",
            _aim(preset, VARIANTS[way], settings),
            detail={
                "planned_s": asdict(planned),
                "split_ms": asdict(split),
                "images": config.training.batch_size,
            },
        ),
        Row(f"{title}: rate", rate, "images/s"),
        _mfu_row(title, flops, rate, preset, settings),
        Row(f"{title}: peak memory", memory, "GB", note=_unless_gpu(settings)),
        *_split_rows(title, split, 1e3 * seconds, settings),
        compiled,
    ]


def _aim(preset: Preset, variant: Variant, settings: Settings) -> str:
    if settings.small or preset.estimate is None:
        return ""
    return f"{preset.estimate * variant.micro_batches:g} estimated without the optimizer"


def _mfu_row(title: str, flops: float, rate: float, preset: Preset, settings: Settings) -> Row:
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if settings.on_gpu else None
    note = _unless_gpu(settings)
    if settings.on_gpu and peak is None:
        note = "this GPU's peak is not in megavis/model/flops.py"
    value = None if peak is None else 100 * strict_mfu(flops, rate, peak)
    return Row(f"{title}: MFU", value, "%", preset.anchor, note=note, detail={"flops": flops})


def strict_mfu(flops_per_image: float, images_per_s: float, peak: float) -> float:
    """Return the fraction of peak FLOP/s used by the model's operations.

    Recomputation is not counted, and only the visible half of causal attention is.
    """
    return flops_per_image * images_per_s / peak


def _split_rows(title: str, split: TimeSplit, step: float, settings: Settings) -> list[Row]:
    # The step was timed without the profiler, which slows down the host.
    idle = None if split.busy is None else max(step - split.busy, 0.0)
    return [
        Row(f"{title}: products", split.products, "ms"),
        Row(f"{title}: attention", split.attention, "ms"),
        Row(f"{title}: the rest", split.rest, "ms"),
        Row(f"{title}: idle", idle, "ms", "0", note=_unless_gpu(settings)),
    ]


def _unless_gpu(settings: Settings) -> str:
    return "" if settings.on_gpu else "means something on a GPU alone"
