"""A study as commands, in order: what `study.yaml` lists, for the numbers of images that are asked.

Paths are relative to the folder of the study, in which all commands run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megavis.checkpoint.format.folder import saved_steps
from megavis.config.load import load_config
from megavis.config.schema import RunConfig

CONFIGS = Path(__file__).parents[2] / "yaml_configs" / "results"
_STUDY = Path(__file__).with_name("study.yaml")
_LONGEST_WARMUP = 200
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
        run: of a training, the run folder, which is finished when a checkpoint has the last step.
        steps: of a training.
    """

    words: tuple[str, ...]
    done: Path
    run: Path | None = None
    steps: int = 0

    @classmethod
    def data(cls, words: Sequence[str], done: Path) -> Task:
        """Return a command of `data_tools`."""
        return cls(("data_tools", *words), done)

    def is_done(self, folder: Path) -> bool:
        """Return whether the command has finished, in the folder of a study."""
        trained = self.run is None or self.steps in saved_steps(folder / self.run)
        return trained and (folder / self.done).exists()

    def __str__(self) -> str:
        program = "megavis" if self.words[0] == "megavis" else "python -m data_tools"
        return f"{program} {shlex.join(self.words[1:])}"


@dataclass(frozen=True)
class Method:
    """A row of a table: a way to train, and its runs.

    Attributes:
        name: of the row.
        data: `cifar10` or `mnist`.
        pretrain: words of the config to pre-train; empty to train from scratch.
        finetune: words of the config to fine-tune; empty for a likelihood.
        is_long: whether training from scratch is as long as pre-training and fine-tuning.
        figure: of `megavis figure`, drawn for the pre-trained run; empty for none.
    """

    name: str
    data: Literal["cifar10", "mnist"]
    pretrain: tuple[str, ...] = ()
    finetune: tuple[str, ...] = ()
    is_long: bool = False
    figure: str = ""

    @property
    def reads(self) -> str:
        """Folder of its shards below `shards`, as `cifar10_16`."""
        words = self.pretrain or self.finetune
        return Path(config_of(words).data.train_sources[0].path).parent.name

    @property
    def pretrained(self) -> Path:
        """Run folder of pre-training."""
        return Path(config_of(self.pretrain).folder)

    @property
    def finetuned(self) -> Path:
        """Run folder of fine-tuning, or of training from scratch."""
        return Path(config_of(self.finetune).folder)


def config_of(words: Sequence[str]) -> RunConfig:
    """Return the config of a file in yaml_configs/results with overrides."""
    return load_config(CONFIGS / words[0], list(words[1:])).config


@dataclass(frozen=True)
class Study:
    """All methods, and the sizes at which they run.

    Attributes:
        images: seen in `pretraining`, `finetuning` and on `mnist`.
        probe: training images for probes, `held_out` and `test`.
        small: whether every command runs, on few images.
    """

    images: Mapping[str, int]
    probe: Mapping[str, int]
    methods: tuple[Method, ...]
    small: bool

    @classmethod
    def read(cls, *, small: bool = False, images: Mapping[str, int], probe: int | None) -> Study:
        """Read `study.yaml`.

        Args:
            small: take the sizes of a small study.
            images: in place of the numbers of images there, by their names.
            probe: training images for probes on test images, in place of the number there.
        """
        tree = yaml.safe_load(_STUDY.read_text(encoding="utf-8"))
        numbers = tree["small" if small else "images"]
        methods = [_method(each, "cifar10") for each in tree["cifar10"]]
        methods += [_method(each, "mnist") for each in tree["mnist"]]
        return cls(
            {**numbers, **images},
            {**tree["small_probe" if small else "probe"], **({"test": probe} if probe else {})},
            tuple(methods),
            small,
        )

    def seen(self, kind: str) -> int:
        """Return the images of `pretraining`, `finetuning`, `both` or `mnist`."""
        both = ("pretraining", "finetuning") if kind == "both" else (kind,)
        return sum(self.images[each] for each in both)

    def trainings(self, method: Method) -> Iterator[Task]:
        """Yield what trains and chooses, which never reads a test image of CIFAR-10."""
        if method.data == "mnist":
            yield self._training("train", method.pretrain, "mnist")
            return
        if method.pretrain:
            yield self._training("train", method.pretrain, "pretraining")
            yield self._probe(method, "held_out")
        yield self._training(
            "finetune", method.finetune, "both" if method.is_long else "finetuning"
        )
        if method.figure:
            path = method.pretrained / f"evaluation/{method.figure}.png"
            words = ("megavis", "figure", method.figure, str(method.pretrained))
            yield Task((*words, "--num-images", "8" if self.small else "64"), path)

    def tests(self, method: Method) -> Iterator[Task]:
        """Yield what evaluates on test images."""
        if method.data == "mnist":
            words = [
                "megavis",
                "likelihood",
                str(method.pretrained),
                "--images",
                "shards/mnist/test",
            ]
            words += ["--num-images", "64"] if self.small else []
            yield Task(tuple(words), method.pretrained / "evaluation/likelihood.json")
            return
        if method.pretrain:
            yield self._probe(method, "test")
        images = f"shards/{method.reads}/test"
        words = ["megavis", "ensemble", str(method.finetuned), "--images", images]
        yield Task((*words, "--json", str(method.finetuned / TEST)), method.finetuned / TEST)

    def _training(self, command: str, config: Sequence[str], kind: str) -> Task:
        """Return a training whose warm-up is at most a tenth of it."""
        found = config_of(config)
        steps = max(1, self.seen(kind) // found.training.batch_size)
        warmup = min(_LONGEST_WARMUP, steps // 10) or 1
        words = [f"yaml_configs/results/{config[0]}", *config[1:], f"training.steps={steps}"]
        words.append(f"schedule.warmup_steps={warmup}")
        words.append(f"training.validate_every={max(1, steps // 4)}")
        run = Path(found.folder)
        made = "evaluation/finetune_test.json" if command == "finetune" else "config.yaml"
        return Task(("megavis", command, *words), run / made, run, steps)

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


def _method(entry: Mapping[str, Any], data: Literal["cifar10", "mnist"]) -> Method:
    return Method(
        entry["method"],
        data,
        tuple(shlex.split(entry.get("pretrain", ""))),
        tuple(shlex.split(entry.get("finetune", ""))),
        entry.get("length") == "both",
        entry.get("figure", ""),
    )
