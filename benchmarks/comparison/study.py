"""The study as commands, in order: what `study.yaml` lists.

Paths are relative to the folder of the study, in which all commands run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results.tasks import Task, TrainedMethod, config_of
from megavis.grammar.paper import PaperConfig

CONFIGS = "yaml_configs/comparison"
IMAGES = Path("shards/letters_32")
"""Shards of the images, from which all others are made."""
PARTS = ("train", "selection", "validation")
CLASSES = 26
PALETTE_SIZE = 128
TOKENIZERS = {"ids": "vqgan", "latents": "vae"}
"""The command that makes shards of each kind of network tokens."""
RECONSTRUCTIONS = Path("evaluation/reconstructions.png")
"""In the run folder of a tokenizer: images, and below them their reconstructions."""
_STUDY = Path(__file__).with_name("study.yaml")


def tokenizer_run(kind: str) -> Path:
    """Return the run folder of the tokenizer of `ids` or `latents`."""
    return Path(config_of((f"{CONFIGS}/{TOKENIZERS[kind]}.yaml",)).folder)


@dataclass(frozen=True)
class Method(TrainedMethod):
    """A method of docs/comparison.md.

    Attributes:
        seed: of its trainings.
        generates: whether images are generated.
        figure: of `megavis figure`, drawn for the pre-trained run; empty for none.
    """

    seed: int
    generates: bool = False
    figure: str = ""

    @property
    def reads(self) -> Path:
        """Folder of its shards."""
        return Path(config_of(self.finetune).data.train_sources[0].path).parent

    @property
    def kind(self) -> str:
        """Kind of its input: `32`, images; `12`, colours; `ids` or `latents`."""
        return self.reads.name.removeprefix("letters_")

    @property
    def last_result(self) -> Path:
        """File that exists once all has been trained, and the last run evaluated."""
        return self.finetuned / "evaluation/finetune_test.json"

    @property
    def reads_draws(self) -> bool:
        """Whether features of an image depend on draws: of latents, or of what is masked."""
        config = config_of(self.pretrain)
        assert isinstance(config.objective, PaperConfig)
        grammar = config.objective.grammar(config)
        return grammar.reads.kind == "latents" or grammar.schedule.kind == "masked"

    @property
    def samples(self) -> Path:
        """The generated images."""
        return self.pretrained / "samples/images.npz"

    @property
    def drawn(self) -> Path:
        """The picture of its figure, if it has one."""
        return self.pretrained / f"evaluation/{self.figure}.png"

    @property
    def has_classes(self) -> bool:
        """Whether the class is given when images are generated."""
        return "num_classes" in type(config_of(self.pretrain).objective).model_fields


@dataclass(frozen=True)
class Study:
    """All methods, and the sizes at which they run.

    Attributes:
        letters: images of each part.
        images: seen in `pretraining`, `finetuning`, and by the tokenizers `vae` and `vqgan`.
        probe: training images of a linear probe.
        num_samples: images that a network with classes generates.
        methods: in the order in which they run: all of a seed before the next.
        small: whether every command runs, on few images.
    """

    letters: Mapping[str, int]
    images: Mapping[str, int]
    probe: int
    num_samples: int
    methods: tuple[Method, ...]
    small: bool

    @classmethod
    def read(cls, *, small: bool = False) -> Study:
        """Read `study.yaml`; the sizes of a small study are those below `small`."""
        tree = yaml.safe_load(_STUDY.read_text(encoding="utf-8"))
        sizes = tree["small"] if small else tree
        methods = [
            _method(entry, seed, tree["finetune"])
            for seed in range(sizes["seeds"])
            for entry in tree["methods"]
        ]
        return cls(
            sizes["letters"],
            sizes["images"],
            sizes["probe"],
            sizes["samples"],
            tuple(methods),
            small,
        )

    def seen(self, method: Method) -> tuple[int, ...]:
        """Return the images that each of a method's trainings sees."""
        kinds = ["pretraining", "finetuning"][0 if method.pretrain else 1 :]
        return tuple(self.images[kind] for kind in kinds)

    def shards(self, method: Method) -> Iterator[Task]:
        """Yield the tasks that make the shards of a method, and their tokenizer."""
        yield from self._letters()
        if method.kind == "12":
            yield from _colors()
        if method.kind in TOKENIZERS:
            yield from self._tokens(method.kind)

    def trainings(self, method: Method) -> Iterator[Task]:
        """Yield the tasks that train and evaluate."""
        seen = list(self.seen(method))
        if method.pretrain:
            yield Task.training("train", method.pretrain, seen.pop(0))
            yield self._probe(method)
        if method.generates:
            yield from self._samples(method)
        if method.figure:
            words = ("figure", method.figure, str(method.pretrained), "--num-images", "4")
            yield _megavis((*words, "--images", str(IMAGES / "validation")), method.drawn)
        yield Task.training("finetune", method.finetune, seen.pop(0))

    def _letters(self) -> Iterator[Task]:
        words = ["letters", "letters", "--size", "32", "--images", str(self.letters["images"])]
        for part in PARTS[1:]:
            words += [f"--{part}-images", str(self.letters[part])]
        yield Task.data(words, Path("letters/letters.json"))
        for part in PARTS:
            words = ["jpeg", f"letters/{part}", "--size", "32", "--lossless"]
            yield _shards(words, IMAGES / part)

    def _tokens(self, kind: str) -> Iterator[Task]:
        """Yield the tasks for a tokenizer, a picture of its reconstructions, and token shards."""
        name, run = TOKENIZERS[kind], tokenizer_run(kind)
        yield Task.training("train", (f"{CONFIGS}/{name}.yaml",), self.images[name])
        path = run / RECONSTRUCTIONS
        words = ("sample", str(run), "--images", str(IMAGES / "validation"))
        yield _megavis((*words, "--num-images", "8", "--out", str(path)), path)
        for part in PARTS:
            own = [kind, str(IMAGES / part), "--tokenizer", str(run), "--size", "32"]
            own += ["--no-flip"] if kind == "latents" else []
            yield _shards(own, Path(f"shards/letters_{kind}") / part)

    def _probe(self, method: Method) -> Task:
        """Return a probe of one view of each image, without a vote where views differ.

        Ids are no quantities, so the images are read, which the run's tokenizer encodes.
        """
        folder = IMAGES if method.kind == "ids" else method.reads
        words = ["probe", str(method.pretrained), "--untrained-networks", "1"]
        words += ["--masks", "1"] if method.reads_draws else []
        words += ["--train", str(folder / "train"), "--train-images", str(self.probe)]
        for part in PARTS[1:]:
            words += [f"--{part}", str(folder / part)]
        words += ["--seed", str(method.seed)]
        return _megavis(tuple(words), method.pretrained / "evaluation/probe.json")

    def _samples(self, method: Method) -> Iterator[Task]:
        run, seed = str(method.pretrained), str(method.seed)
        count = self.num_samples if method.has_classes else CLASSES
        words: tuple[str, ...] = ("sample", run, "--num-images", str(count), "--seed", seed)
        yield _megavis((*words, "--npz", str(method.samples)), method.samples)
        if method.has_classes:
            words = ("evaluate", "classes", run, "--train", str(IMAGES / "train"))
            words += ("--images", str(IMAGES / "validation"), "--seed", seed)
            words += ("--tokenizer", str(tokenizer_run(method.kind)))
            yield _megavis(words, method.pretrained / "evaluation/classes.json")


def _colors() -> Iterator[Task]:
    size = ["--size", "12"]
    words = ["palette", "fit", str(IMAGES / "train"), "--num-colors", str(PALETTE_SIZE), *size]
    yield Task.data([*words, "--out", "palette.npy"], Path("palette.npy"))
    for part in PARTS:
        words = ["palette", "shards", str(IMAGES / part), "--palette", "palette.npy", *size]
        yield _shards(words, Path("shards/letters_12") / part)


def _shards(words: list[str], out: Path) -> Task:
    """Return the task that writes a shard folder, with the class numbers of the images."""
    if out != IMAGES / "train":
        words = [*words, "--classes-from", str(IMAGES / "train")]
    return Task.data([*words, "--out", str(out)], out / "manifest.json")


def _megavis(words: tuple[str, ...], done: Path) -> Task:
    return Task(("megavis", *words), done)


def _method(entry: Mapping[str, Any], seed: int, tuned: Mapping[str, Any]) -> Method:
    """Return an entry of `study.yaml` with a seed; names of runs end in the seed unless it is 0."""
    name = f"comparison_{entry['run']}"
    tag = f"_{seed}" if seed else ""
    shared = [f"{CONFIGS}/{entry['config']}", *_words(entry.get("keys", {}))]
    shared += [f"seed={seed}"] if seed else []
    pretrain = (*shared, f"name={name}{tag}") if entry.get("pretrain", True) else ()
    reads = config_of(tuple(shared)).data.train_sources[0].path
    folder = str(Path(reads).parent / "validation")
    own = {**tuned, "finetune.test": folder, **entry.get("finetune", {})}
    before = [f"finetune.from_run={config_of(pretrain).folder}"] if pretrain else []
    finetune = (*shared, *_words(own), *before, f"name={name}_finetune{tag}")
    if not pretrain:
        finetune = (*shared, *_words(own), f"name={name}{tag}")
    return Method(
        entry["method"],
        pretrain,
        finetune,
        seed,
        entry.get("samples", False),
        entry.get("figure", "") if not seed else "",
    )


def _words(keys: Mapping[str, Any]) -> list[str]:
    """Return keys as overrides; JSON is YAML too."""
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in keys.items()
    ]
