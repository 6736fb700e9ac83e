"""Models, batches and engines of shipped configs, at full and at tiny sizes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_check.results import Settings
from benchmarks.imagenet_hours import write_tokenizer
from benchmarks.palette_shards import run_verb, write_crops
from megavis.composition.trainable import Trainable
from megavis.config.load import exported_names, load_config
from megavis.config.schema import RunConfig
from megavis.model.kernels import choose_kernels
from megavis.model.stack import LayerStack
from megavis.papers import build_objective
from megavis.parallel.context import ParallelContext, close_context, open_context
from megavis.parallel.launch import Launch
from megavis.tokenizers.label_map_vae import LabelMapVAE
from megavis.tokenizers.network_tokenizer import NetworkTokenizer
from megavis.tokenizers.vae import VAE
from megavis.tokenizers.vqgan import VQGAN

CONFIGS = Path(__file__).parents[2] / "yaml_configs"
DEMOS = tuple(sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.glob("*/demo*.yaml")))
"""Every demo's config."""

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=64",
)
"""Overrides that make any model small; images need further ones."""

_TOKENIZERS: Mapping[str, type[NetworkTokenizer]] = {
    "vae": VAE,
    "vae_label_maps": LabelMapVAE,
    "vqgan": VQGAN,
}


@contextlib.contextmanager
def job(
    launch: Launch, settings: Settings, *, deterministic: bool = False
) -> Iterator[ParallelContext]:
    """Open a job of one process on the settings' device, and leave it at the end."""
    context = open_context(launch, device=settings.device, deterministic=deterministic)
    try:
        yield context
    finally:
        close_context()


def read_config(path: str, words: Sequence[str] = ()) -> RunConfig:
    """Return a shipped config, changed by `key=value` words, that needs no data."""
    without_data = ("data.train=none", "data.validation=null", *words)
    return load_config(CONFIGS / path, without_data).config


def read_demo(path: str, folder: Path, words: Sequence[str] = ()) -> RunConfig:
    """Return a demo's config, with an untrained tokenizer in `folder` if it needs one."""
    config = read_config(path, words)
    names = list(exported_names(config))
    if not names:
        return config
    [name] = names
    # runs/givt_demo_vae is trained by givt/demo_vae.yaml.
    source = f"{Path(name).name.replace('_', '/', 1)}.yaml"
    kind = _TOKENIZERS[read_config(source).objective.name]
    tokenizer = folder / Path(source).stem
    shutil.rmtree(tokenizer, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, kind, source)
    return read_config(path, [f"objective.tokenizer={tokenizer}", *words])


def plain_model(config: RunConfig, context: ParallelContext) -> tuple[Trainable, LayerStack]:
    """Return the objective and its layers on the CPU, in float32, without an engine."""
    # A part whose blocks could not be compiled has changed the process's kernels.
    choose_kernels(config.training.kernels)
    objective = build_objective(config, context)
    return objective, LayerStack(objective.layer_plans(), objective.loss).train()


def write_jpeg_shards(folder: Path, *, count: int) -> Path:
    """Write JPEG shards of 500x375 crops of scikit-learn's photographs; return their folder."""
    return _write_shards(folder, count, "jpeg", "jpeg")


def write_palette_shards(folder: Path, *, count: int, size: int) -> Path:
    """Write palette shards of the same crops, with 512 colours; return their folder."""
    images = _write_images(folder, count)
    run_verb("palette", "fit", images, "--out", folder / "palette.npy", "--pixels", 20_000)
    palette = ("--palette", folder / "palette.npy", "--size", size)
    return _write_shards(folder, count, "palette", "palette", "shards", options=palette)


def _write_shards(
    folder: Path, count: int, name: str, *verb: str, options: Sequence[object] = ()
) -> Path:
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)
    run_verb(*verb, _write_images(folder, count), "--out", out, *options)
    return out


def _write_images(folder: Path, count: int) -> Path:
    images = folder / f"{count}_images"
    if not images.exists():
        images.mkdir(parents=True)
        write_crops(images, count=count, packages=("sklearn",))
    return images
