"""`--dry-run` of every shipped config, and of every row of docs/papers, command of a header and run
of docs/comparison.md that overrides its keys, on small shards of the kind it reads.

Batches are the smallest that the layout allows, and shards hold one batch of identical samples.
Tokenizers have the presets' shapes with fewer filters. Runs to fine-tune consist of a config and an
empty checkpoint.
"""

import functools
import hashlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from children import open_child
from folded_back import folded_runs, retraining
from preset_headers import commands_with_keys
from protocols import row_words
from small_codebook import write_run
from written_shards import write_payloads

from benchmarks.comparison.study import Study
from benchmarks.results.tasks import config_of
from megavis.checkpoint.state.save import write_weights
from megavis.config.load import dump_config, load_config
from megavis.config.schema import FinetuneConfig
from megavis.data.codecs.sound import write_noises
from megavis.data.format.manifest import SourceIdentity, TargetMaps, TokenizerIdentity
from megavis.data.format.shards import payload_bytes
from megavis.grammar.paper import PaperConfig
from megavis.grammar.words import Labels
from megavis.papers.darl.config import DARLConfig
from megavis.papers.givt.config import EncoderDecoderConfig
from megavis.papers.vae.config import VAEConfig
from megavis.tokenizers.label_map_vae import LabelMapVAE
from megavis.tokenizers.network_tokenizer import open_tokenizer
from megavis.tokenizers.palette import Palette, grey_palette
from megavis.tokenizers.vae import VAE
from megavis.tokenizers.vqgan import VQGAN
from megavis.training import dry_run

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[3] / "yaml_configs"
GPUS = re.compile(r"^# \S+ on (\d+) \S+ GPUs", re.MULTILINE)
# Path and overridden keys by run name.
SOURCES = {
    **{f"{path.parent.name}_{path.stem}": (path, ()) for path in sorted(ROOT.glob("*/*.yaml"))},
    **row_words(),
    **commands_with_keys("train", "finetune"),
    # The study of docs/comparison.md, one seed.
    **{
        config_of(words).name: (ROOT.parent / words[0], words[1:])
        for method in Study.read(small=True).methods
        for words in (method.pretrain, method.finetune)
        if words
    },
    # Section 3.1 of iGPT's paper: all are trained again, also those without a command of their own.
    **{
        config.name: (run.path, tuple(words))
        for run in folded_runs()
        for config, words in [retraining(run)]
    },
}
# What headers import instead of training it, by run folder: the VAE of MAR's released code.
IMPORTED = {"runs/kl16": VAEConfig(layers="taming", multipliers=[1, 1, 2, 2, 4])}
# Folders of maps with the classes that a config has.
OF_SEGMENTS = r"ade20k|scenes_(labelled|held_out)"
# Shard kinds by folder name; all others hold JPEG files.
KINDS = [
    (r"latents", "latents"),
    (rf"pairs|coarse|panoptic|_depth|_instances|{OF_SEGMENTS}", "pairs"),
    (r"ids", "ids"),
    (r"speech|digits", "recordings"),
    (r"cifar\d+_(16|32)|mnist|letters_12|demo/(train|selection|validation)$", "palette"),
]


@functools.cache
def loaded():
    """Return all configs by run name."""
    return {name: load_config(*source) for name, source in SOURCES.items()}


@functools.cache
def runs():
    """Return all configs by run folder."""
    return {str(each.config.folder): each.config for each in loaded().values()}


def folders_of(config):
    """Return all shard folders that a config names."""
    test = config.finetune.test if config.finetune else None
    train = [source.path for source in config.data.train_sources]
    return [*train, *filter(None, (config.data.validation, test))]


def readers_of(folder):
    """Return the configs that name a folder of shards."""
    return [config for config in runs().values() if folder in folders_of(config)]


def processes_of(config):
    """Return the number of GPUs a preset's header names, or 1."""
    found = GPUS.search(SOURCES[config.name][0].read_text())
    return int(found[1]) if found else 1


def batch_of(config):
    """Return the smallest batch that the layout allows; even, as mixup pairs samples."""
    return 2 * processes_of(config) * (config.training.micro_batch_size or 1)


def classes_of(config):
    """Return the number of label classes, or 0 if labels are unused."""
    if config.finetune:
        return config.finetune.num_classes
    if not isinstance(config.objective, PaperConfig):
        return 0
    condition = config.objective.grammar(config).condition
    return condition.num_classes if isinstance(condition, Labels) else 0


def tokenizer_of(config):
    """Return the tokenizer that a config names, or None."""
    words = [config.objective]
    if isinstance(config.objective, PaperConfig):
        grammar = config.objective.grammar(config)
        words = [each for each in (grammar.reads, grammar.predicts, grammar.condition) if each]
    for section in words:
        if "tokenizer" in type(section).model_fields and section.tokenizer:
            return tokenizer(section.tokenizer)
    return None


@functools.cache
def tokenizer(folder):
    """Write a tokenizer run of the preset's shape with few filters, and open it."""
    objective = IMPORTED[folder] if folder in IMPORTED else runs()[folder].objective
    section = objective.model_dump(mode="json")
    if objective.name == "vae_label_maps":
        tree = runs()[folder].model_dump(mode="json")
        small = {"hidden_size": 12, "ffn_hidden_size": 12, "num_layers": 1}
        parts = {"model": {**tree["model"], **small}, "data": tree["data"]}
        section |= {"decoder_layers": 1}
        network = LabelMapVAE.from_config({"objective": section, **parts})
        write_run(Path(folder), network, section, **parts)
        return open_tokenizer(folder)
    section |= {"filters": 32}
    network = {"vae": VAE, "vqgan": VQGAN}[section["name"]].from_config({"objective": section})
    write_run(Path(folder), network, section)
    return open_tokenizer(folder)


def tokens_of(config):
    """Return the word of the tokens that a config reads."""
    return config.objective.grammar(config).reads


def palette_of(config):
    """Return the file of the palette with as many colours as the run has."""
    return "grey.npy" if tokens_of(config).vocabulary_size == 256 else "palette.npy"


def identity_of(config):
    """Return the SHA-256 of the run's palette or tokenizer, or None."""
    if config.objective.name == "igpt":
        return Palette.load(palette_of(config)).sha256
    found = tokenizer_of(config)
    return found.identity() if found else None


def shards_of(config, folder):
    """Return a sample's suffix and size in bytes, and the folder's manifest fields."""
    size = config.data.image_size
    kind = next((kind for pattern, kind in KINDS if re.search(pattern, folder)), "jpeg")
    fields = {"kind": kind, "image_size": size or None}
    if kind == "recordings":
        shape = config.data.frames
        return "pcm", 320 * shape[0], {**fields, "frame_shape": shape}
    if kind == "latents":
        shape = tokenizer_of(config).latent_shape(size)
        name = TokenizerIdentity(kind="vae", sha256=identity_of(config))
        fields |= {"latent_shape": shape, "tokenizer": name, "flipped": config.data.flip}
        return "lat", 4 * int(np.prod(shape)) * (1 + config.data.flip), fields
    if kind == "ids":
        made_by = tokenizer_of(config)
        count, vocabulary = made_by.num_tokens(size), made_by.vocabulary_size
        name = TokenizerIdentity(kind="vqgan", sha256=made_by.identity(), num_tokens=vocabulary)
        return "ids", 2 * count, {**fields, "num_tokens": count, "tokenizer": name}
    if kind == "palette":
        # The demos' palette has fewer colours than iGPT's vocabulary.
        vocabulary = min(tokens_of(reader).vocabulary_size for reader in readers_of(folder))
        name = Palette.load(palette_of(config)).sha256
        name = TokenizerIdentity(kind="palette", sha256=name, num_tokens=vocabulary)
        fields |= {"num_tokens": size**2, "tokenizer": name}
        return "tok", payload_bytes(size**2), fields
    if re.search(rf"panoptic|{OF_SEGMENTS}", folder):
        count = 5 if "panoptic" in folder else classes_of(config)
        classes = tuple(map(str, range(count)))
        target = TargetMaps(kind="panoptic", class_names=classes, things=(True,) * count)
        fields |= {"target": target, "image_size": None}
    if "_instances" in folder:
        classes = tuple(map(str, range(classes_of(config))))
        target = TargetMaps(kind="instances", class_names=classes, things=(True,) * len(classes))
        fields |= {"target": target, "image_size": None}
    if "_depth" in folder:
        fields |= {"target": TargetMaps(kind="depth"), "image_size": None}
    return {"jpeg": "jpg", "pairs": "pair"}[kind], 64, fields


def write_shards(config, folder):
    """Write a folder's shards with enough samples for one batch of any preset."""
    readers = readers_of(folder)
    classes = max(map(classes_of, readers)) or 1
    each = max(config.data.images_per_class or 0 for config in readers)
    count = max(*map(batch_of, readers), each * classes)
    digest = hashlib.sha256(folder.encode())
    suffix, length, fields = shards_of(config, folder)
    write_payloads(
        Path(folder),
        [(digest.digest() * length)[:length]] * count,
        suffix=suffix,
        labels=[number % classes for number in range(count)],
        class_names=[str(label) for label in range(classes)],
        samples_per_shard=count,
        source=SourceIdentity(description=folder, num_files=count, sha256=digest.hexdigest()),
        **fields,
    )
    if suffix == "tok":
        shutil.copy(palette_of(config), Path(folder) / "palette.npy")


def write_finished(folder):
    """Write a finished run: its config, an empty checkpoint and its shards."""
    config = runs()[folder]
    write_weights(Path(folder), {}, seed=config.seed, tokenizer=identity_of(config))
    (Path(folder) / "config.yaml").write_text(dump_config(config))
    for shards in folders_of(config):
        prepare(config, shards)


def write_vision_transformer(folder, config):
    """Write the run of a released ViT from which an encoder starts, with weights of nothing."""
    model = config.model.model_copy(
        update={
            "num_layers": config.objective.encoder_layers,
            "activation": config.objective.encoder_activation,
            "add_bias": True,
            "attention_bias": True,
            "norm_bias": "all",
            "positions": "learned",
        }
    )
    sections = {
        "objective": DARLConfig(patch_size=config.objective.encoder_patch_size),
        "finetune": FinetuneConfig(num_classes=2, visibility="full", read_out="first"),
        "model": model,
    }
    write_weights(Path(folder), {}, seed=config.seed, tokenizer=None)
    training = config.training.model_copy(update={"validate_every": 1})
    source = config.model_copy(update={**sections, "training": training})
    (Path(folder) / "config.yaml").write_text(dump_config(source))


def prepare(config, folder):
    if not Path(folder).exists():
        write_shards(config, folder)


@pytest.fixture(scope="module")
def in_folder(tmp_path_factory):
    """A process in a temporary folder: presets name shards and runs by relative paths."""
    folder = tmp_path_factory.mktemp("presets")
    colors = np.random.default_rng(0).uniform(-1, 1, (512, 3)).astype(np.float32)
    Palette(colors).save(folder / "palette.npy")
    grey_palette().save(folder / "grey.npy")
    with open_child(folder) as run:
        yield run


@pytest.mark.parametrize("name", SOURCES)
def test_run_passes_dry_run(name, in_folder):
    findings = in_folder(findings_of, name)
    assert not [text for text, is_right, _ in findings if not is_right]
    assert findings[-1][-1] == "resume"


def findings_of(name):
    """Return the findings of a run's dry run, for which its data are written first."""
    # Pretend that there is disk space: the largest model's checkpoints take 500 GB.
    dry_run.shutil.disk_usage = lambda _: SimpleNamespace(free=1e15)
    config = loaded()[name].config
    small = config.training.model_copy(update={"batch_size": batch_of(config)})
    # Use an output folder without tokenizers or finished runs.
    config = config.model_copy(update={"output": "new", "training": small})
    identity_of(config)
    for folder in folders_of(config):
        prepare(config, folder)
    if noise := config.data.background_noise:
        write_noises(Path(noise), [np.ones(16_000, np.int16)])
    before = config.finetune and config.finetune.from_run
    if before and not Path(before).exists():
        write_finished(before)
    objective = config.objective
    encoder = isinstance(objective, EncoderDecoderConfig) and objective.encoder_from_run
    if encoder and not Path(encoder).exists():
        if encoder in runs():
            write_finished(encoder)
        else:
            write_vision_transformer(encoder, config)
    findings = dry_run.dry_run(config, processes_of(config))
    return [(str(finding), finding.is_right, finding.topic) for finding in findings]
