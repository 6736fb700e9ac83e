"""A study as commands, in order: what `study.yaml` lists, for the requested numbers of images.

Paths are relative to the folder of the study, in which all commands run.
"""

from __future__ import annotations

import functools
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megavis.checkpoint.format.folder import saved_steps
from megavis.config.load import load_config
from megavis.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
_CONFIGS = "yaml_configs/results"
_STUDY = Path(__file__).with_name("study.yaml")
_LONGEST_WARMUP = 200
DataSet = Literal["cifar10", "mnist", "digits"]
HELD_OUT = Path("evaluation/held_out.json")
"""In a run folder: the probe evaluated on held-out training images."""
TEST = Path("evaluation/test.json")
"""In a run folder: the probe, or a fine-tuned network, evaluated on the test images."""


@dataclass(frozen=True)
class Task:
    """A command.

    Attributes:
        words: `megavis` or `data_tools`, and its arguments.
        done: the file that exists once the command has finished.
        run: run folder of a training, which is finished once a checkpoint has the last step.
        steps: steps of a training.
    """

    words: tuple[str, ...]
    done: Path
    run: Path | None = None
    steps: int = 0

    @classmethod
    def data(cls, words: Sequence[str], done: Path) -> Task:
        """Return a command of `data_tools`."""
        return cls(("data_tools", *words), done)

    @classmethod
    def training(cls, command: str, config: tuple[str, ...], images: int) -> Task:
        """Return a training whose warm-up is at most a tenth of it.

        Args:
            command: `train` or `finetune`.
            config: file, relative to the checkout, and overrides.
            images: number of images that it sees.
        """
        found = config_of(config)
        steps = max(1, images // found.training.batch_size)
        warmup = min(_LONGEST_WARMUP, steps // 10) or 1
        words = [*config, f"training.steps={steps}"]
        words.append(f"schedule.warmup_steps={warmup}")
        words.append(f"training.validate_every={max(1, steps // 4)}")
        run = Path(found.folder)
        made = "evaluation/finetune_test.json" if command == "finetune" else "config.yaml"
        return cls(("megavis", command, *words), run / made, run, steps)

    @property
    def made(self) -> str:
        """What it makes, as recorded with its time: the run folder, or the file."""
        return str(self.run or self.done)

    @property
    def is_evaluation(self) -> bool:
        """Whether it evaluates what others make, in a short time."""
        return self.words[0] == "megavis" and self.run is None

    @property
    def is_evaluated(self) -> bool:
        """Whether later commands evaluate what it makes: weights, or generated images."""
        return self.run is not None or self.done.suffix == ".npz"

    def is_done(self, folder: Path) -> bool:
        """Return whether the command has finished, in the folder of a study."""
        trained = self.run is None or self.steps in saved_steps(folder / self.run)
        return trained and (folder / self.done).exists()

    def __str__(self) -> str:
        program = "megavis" if self.words[0] == "megavis" else "python -m data_tools"
        return f"{program} {shlex.join(self.words[1:])}"


@dataclass(frozen=True)
class TrainedMethod(ABC):
    """A way to train, with one seed, and its runs.

    Attributes:
        name: of the row in a table.
        pretrain: file and overrides of the config to pre-train; empty to train from scratch.
        finetune: file and overrides of the config to fine-tune; empty for a likelihood.
    """

    name: str
    pretrain: tuple[str, ...]
    finetune: tuple[str, ...]

    @property
    def pretrained(self) -> Path:
        """Run folder of pre-training."""
        return Path(config_of(self.pretrain).folder)

    @property
    def finetuned(self) -> Path:
        """Run folder of fine-tuning, or of training from scratch."""
        return Path(config_of(self.finetune).folder)

    @property
    def runs(self) -> list[Path]:
        """Run folders of its trainings, in order."""
        return [Path(config_of(words).folder) for words in (self.pretrain, self.finetune) if words]

    @property
    @abstractmethod
    def last_result(self) -> Path:
        """File that exists once all has been trained, and the last run evaluated."""


@dataclass(frozen=True)
class Method(TrainedMethod):
    """A method of docs/results.md.

    Attributes:
        data: which it is trained on.
        tokenizer: config of the VAE whose latents are generated, as `pretrain`; empty for others.
        is_long: whether training from scratch is as long as pre-training and fine-tuning.
        figure: of `megavis figure`, drawn for the pre-trained run; empty for none.
    """

    data: DataSet
    tokenizer: tuple[str, ...] = ()
    is_long: bool = False
    figure: str = ""

    @property
    def reads(self) -> str:
        """Folder of its shards below `shards`, as `cifar10_16`."""
        words = self.pretrain or self.finetune
        return Path(config_of(words).data.train_sources[0].path).parent.name

    @property
    def runs(self) -> list[Path]:
        """Run folders of its trainings, in order."""
        return [
            *([Path(config_of(self.tokenizer).folder)] if self.tokenizer else []),
            *super().runs,
        ]

    @property
    def last_result(self) -> Path:
        """File that exists once all has been trained, and the last run evaluated."""
        name = "finetune_test" if self.finetune else "samples" if self.tokenizer else "likelihood"
        return self.runs[-1] / f"evaluation/{name}.json"


@functools.cache
def config_of(words: tuple[str, ...]) -> RunConfig:
    """Return the config of a file, relative to the checkout, with overrides."""
    return load_config(ROOT / words[0], list(words[1:])).config


@dataclass(frozen=True)
class Study:
    """All methods, and the sizes at which they run.

    Attributes:
        images: images seen in `pretraining` and `finetuning`, by data set.
        probe: training images for probes, `held_out` and `test`.
        generated: numbers of generated images and of training images for Fréchet distances.
        methods: in the order in which they run.
        small: whether every command runs, on few images.
    """

    images: Mapping[str, Mapping[str, int]]
    probe: Mapping[str, int]
    generated: tuple[int, int]
    methods: tuple[Method, ...]
    small: bool

    @classmethod
    def read(
        cls,
        *,
        small: bool = False,
        images: Mapping[tuple[str, str], int] | None = None,
        probe: int | None = None,
    ) -> Study:
        """Read `study.yaml`.

        Args:
            small: take the sizes of a small study.
            images: in place of the numbers there, by data set and `pretraining` or `finetuning`.
            probe: training images for probes on test images, in place of the number there.
        """
        tree = yaml.safe_load(_STUDY.read_text(encoding="utf-8"))
        numbers = tree["small" if small else "images"]
        for (data, kind), number in (images or {}).items():
            numbers[data][kind] = number
        probes = tree["small_probe" if small else "probe"]
        if probe is not None:
            probes["test"] = probe
        methods = [method for entry in tree["methods"] for method in _methods(entry)]
        generated = tree["small_generated" if small else "generated"]
        return cls(
            numbers, probes, (generated["images"], generated["reference"]), tuple(methods), small
        )

    def seen(self, method: Method) -> tuple[int, ...]:
        """Return the images that each of a method's trainings sees."""
        numbers = self.images[method.data]
        if method.tokenizer:
            return numbers["tokenizer"], numbers["latents"]
        if method.is_long:
            return (numbers["pretraining"] + numbers["finetuning"],)
        kinds = {"pretraining": method.pretrain, "finetuning": method.finetune}
        return tuple(numbers[kind] for kind, words in kinds.items() if words)

    def trainings(self, method: Method) -> Iterator[Task]:
        """Yield the tasks that train and select, which read no classes of test images."""
        seen = list(self.seen(method))
        if method.tokenizer:
            yield from self._generation(method)
            return
        if method.pretrain:
            yield Task.training("train", method.pretrain, seen.pop(0))
        if method.pretrain and method.data == "cifar10":
            yield self._probe(method, "held_out")
        if method.finetune:
            yield Task.training("finetune", method.finetune, seen.pop(0))
        if method.figure:
            path = method.pretrained / f"evaluation/{method.figure}.png"
            words = ("megavis", "figure", method.figure, str(method.pretrained))
            yield Task((*words, "--num-images", "8" if self.small else "64"), path)

    def tests(self, method: Method) -> Iterator[Task]:
        """Yield the tasks that evaluate on test images; none for generation."""
        if method.tokenizer:
            return
        images = f"shards/{method.reads}/test"
        if not method.finetune:
            words = ["megavis", "likelihood", str(method.pretrained), "--images", images]
            words += ["--num-images", "64"] if self.small else []
            yield Task(tuple(words), method.pretrained / "evaluation/likelihood.json")
            completed = ("--prefix", "half", "--completions", "4", "--images", images)
            for name, options in (("generated", ()), ("completions", completed)):
                path = method.pretrained / f"evaluation/{name}.png"
                drawn = ("sample", str(method.pretrained), *options, "--num-images", "8")
                yield _evaluation((*drawn, "--out", str(path)), path)
            return
        if method.pretrain and method.data == "cifar10":
            yield self._probe(method, "test")
        words = ["megavis", "ensemble", str(method.finetuned), "--images", images]
        yield Task((*words, "--json", str(method.finetuned / TEST)), method.finetuned / TEST)

    def _generation(self, method: Method) -> Iterator[Task]:
        """Yield a VAE, a model of its latents, and the distance of samples from training images."""
        (vae, run), (tokens, latents) = method.runs, self.seen(method)
        train, held_out = "shards/cifar10/train", "shards/cifar10/selection"
        training = train + "_features.npz"
        count, reference = (str(number) for number in self.generated)
        network = ("--network", "efficientnet-lite0")
        yield Task.training("train", method.tokenizer, tokens)
        words: tuple[str, ...]
        words = ("evaluate", "reconstruction", str(vae), "--images", held_out)
        words += ("--num-images", count, *network)
        yield _evaluation(words, vae / "evaluation/reconstruction.json")
        path = vae / "evaluation/reconstructions.png"
        words = ("sample", str(vae), "--images", held_out, "--num-images", "10")
        yield _evaluation((*words, "--out", str(path)), path)
        words = ("evaluate", "statistics", train, "--num-images", reference, *network)
        yield _evaluation((*words, "--out", training), Path(training))
        path = vae / "evaluation/held_out.json"
        words = ("evaluate", "samples", held_out, "--reference", training, "--num-images", count)
        yield _evaluation((*words, *network, "--out", str(path)), path)
        for part in (train, held_out):
            out = f"shards/{method.reads}/{Path(part).name}"
            words = ("latents", part, "--tokenizer", str(vae), "--size", "32", "--out", out)
            yield Task.data(words, Path(out) / "manifest.json")
        yield Task.training("train", method.pretrain, latents)
        path = run / "evaluation/classes.png"
        words = ("sample", str(run), "--classes", "0,1,2,3,4,5,6,7,8,9", "--out", str(path))
        yield _evaluation(words, path)
        images = run / "samples/images.npz"
        words = ("sample", str(run), "--num-images", count, "--npz", str(images))
        yield _evaluation(words, images)
        words = ("evaluate", "samples", str(run), "--reference", training, *network)
        yield _evaluation(words, run / "evaluation/samples.json")

    def _probe(self, method: Method, part: Literal["held_out", "test"]) -> Task:
        folder = f"shards/{method.reads}"
        words = ["megavis", "probe", str(method.pretrained), "--untrained-networks", "1"]
        words += ["--train-images", str(self.probe[part])]
        if part == "held_out":
            words += ["--validation", f"{folder}/selection"]
        else:
            words += ["--selection", f"{folder}/selection", "--validation", f"{folder}/test"]
        out = method.pretrained / (HELD_OUT if part == "held_out" else TEST)
        return Task((*words, "--out", str(out)), out)


def _evaluation(words: Sequence[str], done: Path) -> Task:
    return Task(("megavis", *words), done)


def _methods(entry: Mapping[str, Any]) -> Iterator[Method]:
    """Yield an entry of `study.yaml` per seed; names of runs end in the seed unless it is 0."""
    tokenizer, pretrain, finetune = (
        tuple(shlex.split(f"{_CONFIGS}/{entry[kind]}")) if kind in entry else ()
        for kind in ("tokenizer", "pretrain", "finetune")
    )
    for seed in range(entry.get("seeds", 1)):
        before, after = (
            (*words, f"seed={seed}", f"name={config_of(words).name}_{seed}")
            if seed and words
            else words
            for words in (pretrain, finetune)
        )
        if seed and before and after:
            after = (*after, f"finetune.from_run={config_of(before).folder}")
        yield Method(
            entry["method"],
            before,
            after,
            entry["data"],
            tokenizer,
            entry.get("length") == "both",
            entry.get("figure", "") if not seed else "",
        )
