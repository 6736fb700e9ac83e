"""Read released weights of any form, check them, and write the run that they become.

A form says what a file or folder holds: the config of a run and a table of names. What is common to
all stands here: opening the files, one check of names and shapes, and writing the run folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megavis.checkpoint.format.folder import chosen_checkpoint, latest_checkpoint
from megavis.checkpoint.format.manifest import file_damage, read_manifest
from megavis.checkpoint.format.tensor_files import load_tensors, require_readable
from megavis.checkpoint.format.tensor_reader import read_weights
from megavis.checkpoint.state.save import write_weights
from megavis.config.errors import UserError, describe_os_error
from megavis.config.load import dump_config, exported_names, load_config, with_tokenizers
from megavis.config.schema import ObjectiveConfig, OptimizerConfig, RunConfig, TrainingConfig
from megavis.config.section import DataConfig
from megavis.data.format.files import copy_folder, sha256_of_file
from megavis.data.format.manifest import PALETTE_NAME
from megavis.grammar.same_run import words_of
from megavis.papers import build_objective
from megavis.parallel.context import close_context, current_context, open_virtual_context
from megavis.tokenizers.network_tokenizer import open_tokenizer, read_weights_file
from megavis.tokenizers.palette import Palette
from megavis.weights.tables import Table, read_table, write_table

WEIGHTS, SETTINGS = "model.safetensors", "config.json"


class ReleasedTensors(dict[str, Tensor]):
    """Tensors by their released names; one that is missing or has no dimension raises UserError.

    Attributes:
        source: their file or folder.
        model: what has such tensors, for messages.
        saved: names of the saved classes, if `config.json` gives them.
        implied: what determines their names and shapes, with its verb.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        source: Path,
        model: str,
        saved: str = "",
        implied: str = "the other tensors imply",
    ) -> None:
        super().__init__(tensors)
        self.source, self.model, self.saved, self.implied = source, model, saved, implied

    @classmethod
    def of_file(
        cls, source: Path, *, model: str, inside: Sequence[str] = ("state_dict",)
    ) -> ReleasedTensors:
        """Read a file of weights, in float32; `inside` and errors are `read_weights_file`'s."""
        stored = read_weights_file(source, inside=inside)
        floats = {name: tensor.float() for name, tensor in stored.items()}
        return cls(floats, source=source, model=model)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = super().__getitem__(name)
        if not tensor.ndim:  # Sizes are read from shapes, before they are checked.
            raise UserError(f"{self.source}: {name} is a single number, which {self.model} has not")
        return tensor

    def __missing__(self, name: str) -> Tensor:
        saved = f"; config.json names {self.saved}" if self.saved else ""
        raise UserError(f"{self.source}: the weights have no {name}, which {self.model} has{saved}")

    def check(self, wanted: Mapping[str, Tensor], *, ignored: str = "(?!)") -> None:
        """Check names and shapes.

        Args:
            wanted: tensors, maybe on the meta device, of the names and shapes that must be here.
            ignored: regular expression of names that may be here too.

        Raises:
            UserError: a tensor is missing, does not belong to the model, or has another shape.
        """
        for name in wanted:
            self[name]
        for name in self:
            if name not in wanted and not re.match(ignored, name):
                raise UserError(
                    f"{self.source}: {name} does not belong to {self.model}; {self.implied} no such"
                    " tensor"
                )
        for name, tensor in wanted.items():
            if self[name].shape != tensor.shape:
                raise UserError(
                    f"{self.source}: {name} has shape {list(self[name].shape)}; {self.implied}"
                    f" {list(tensor.shape)}"
                )


@dataclass(frozen=True)
class Released:
    """Released weights, and the run that they become.

    Attributes:
        objective: the paper's section.
        tensors: as released.
        table: their names and ours.
        image_size: side of the images in pixels.
        sections: further config sections, such as `model`.
        derived: makes, of the run's parameters, tensors that the table has besides them, such as
            biases that are always zero.
        ignored: regular expression of released names that have no place in the run.
        validates: the sections require `data.validation`.
        palette: to keep with the run, if any.
        classes: names, by label, of the classes that it predicts, if the folder has them.
        note: a sentence about what differs from the released network, if anything does.
        part: file of a part that is released on its own, among the tensors; None without one.
    """

    objective: ObjectiveConfig
    tensors: ReleasedTensors
    table: Table
    image_size: int
    sections: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda _: {}
    ignored: str = "(?!)"
    validates: bool = False
    palette: Palette | None = None
    classes: tuple[str, ...] = ()
    note: str = ""
    part: Path | None = None

    def config(self, run_folder: Path) -> RunConfig:
        """Return the config of the run; its training keys are for further training."""
        validation = "shards/validation" if self.validates else None
        return RunConfig(
            name=run_folder.name,
            output=str(run_folder.parent),
            objective=self.objective,
            data=DataConfig(
                train="shards/train", validation=validation, image_size=self.image_size
            ),
            optimizer=OptimizerConfig(learning_rate=1e-4),
            training=TrainingConfig(steps=1, batch_size=128, validate_every=int(self.validates)),
            **self.sections,
        )

    def write(self, run_folder: Path) -> int:
        """Write the run folder; return its number of parameters.

        Raises:
            UserError: the tensors do not exactly make up a network of these sizes.
        """
        config = self.config(run_folder)
        own = blank_weights(config)
        self.tensors.check(
            write_table(self.table, {**self.derived(own), **own}), ignored=self.ignored
        )
        found = read_table(self.table, self.tensors)
        # A run stores nothing for derived tensors.
        weights = {name: tensor for name, tensor in found.items() if name in own}
        assert weights.keys() == own.keys(), "a table has a row for every tensor of the run"
        write_run(
            run_folder,
            config,
            weights,
            palette=self.palette,
            classes=self.classes,
            words=words_of(config),
            origin="; ".join(
                origin_of(each) for each in (self.tensors.source, self.part) if each is not None
            ),
        )
        return sum(tensor.numel() for tensor in weights.values())


def blank_weights(config: RunConfig) -> dict[str, Tensor]:
    """Return the parameters and buffers of a run on the meta device, by name."""
    joined = current_context()
    context = joined or open_virtual_context(0, 1)
    try:
        found: dict[str, Tensor] = {}
        for plan in build_objective(config, context).layer_plans():
            with torch.device("meta"):
                module = plan.build()
            named = (*module.named_parameters(), *module.named_buffers())
            found |= {f"{plan.name}.{name}": tensor.detach() for name, tensor in named}
        return found
    finally:
        if joined is None:
            close_context()


def write_run(
    run_folder: Path,
    config: RunConfig,
    weights: Mapping[str, Tensor],
    *,
    palette: Palette | None = None,
    tokenizer: str | None = None,
    classes: tuple[str, ...] = (),
    trained: tuple[int, int] = (0, 0),
    words: Mapping[str, Any] | None = None,
    origin: str | None = None,
    inside: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Write a new run folder with a checkpoint; delete it if it cannot be completed.

    Args:
        weights: unsharded parameters under megavis' names.
        palette: to keep with the run, if any.
        tokenizer: SHA-256 of the tokenizer that it was trained with; default: the palette's.
        classes: names, by label, of the classes that it reads or predicts, if known.
        trained: steps and images of its training with megavis.
        words: of the paper that the weights were trained with, if known.
        origin: where imported weights came from.
        inside: folders to copy into it, by name.

    Raises:
        UserError: the folder exists, for example as another process has written it meanwhile.
    """
    try:
        run_folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{run_folder} exists; choose another name") from None
    try:
        (run_folder / "config.yaml").write_text(dump_config(config))
        if palette is not None:
            palette.save(run_folder / PALETTE_NAME)
        if tokenizer is None and palette is not None:
            tokenizer = palette.sha256
        write_weights(
            run_folder,
            weights,
            seed=config.seed,
            tokenizer=tokenizer,
            classes=classes,
            trained=trained,
            words=words,
            origin=origin,
        )
        for name, folder in inside.items():
            copy_folder(folder, run_folder / name)
    except BaseException:
        shutil.rmtree(run_folder, ignore_errors=True)
        raise


def origin_of(source: Path) -> str:
    """Return the name of a released file or folder, and the SHA-256 of the files that are read.

    In the Hub's cache, `models--OWNER--NAME/snapshots/COMMIT`, the repository has the name.
    """
    place = source.absolute()
    folder, name, files = place.parent, place.name, [place]
    if place.is_dir():
        # As `read_hub_weights`: the folder may hold the weights in other formats too.
        folder, whole = place, place / WEIGHTS
        files = [whole] if whole.exists() else sorted(place.glob("*.safetensors"))
    if folder.parent.name == "snapshots":
        repository = folder.parents[1].name.removeprefix("models--").replace("--", "/")
        name = f"{repository} at commit {folder.name}"
    return "; ".join(
        [name, *(f"{file.name} has the SHA-256 {sha256_of_file(file)}" for file in files)]
    )


def import_own(source: Path, run_folder: Path) -> None:
    """Write a run folder from a folder that `megavis export` wrote, with its tokenizers.

    Raises UserError if a file is missing, or has changed since it was written.
    """
    checkpoint = _whole_checkpoint(source)
    names = {"name": run_folder.name, "output": str(run_folder.parent)}
    config = load_config(source / "config.yaml").config.model_copy(update=names)
    inside = list(exported_names(config))
    for name in inside:
        _whole_checkpoint(source / name)
        open_tokenizer(source / name)
    # In the config of a run that is trained further, paths are relative to where the command runs.
    config = with_tokenizers(config, {name: str(run_folder / name) for name in inside})
    manifest, palette = read_manifest(checkpoint), source / PALETTE_NAME
    colors = Palette.load(palette) if palette.exists() else None
    if colors is not None and manifest.tokenizer not in (None, colors.sha256):
        raise UserError(f"{palette}: not the palette that the weights were trained with; {_AGAIN}")
    write_run(
        run_folder,
        config,
        read_weights(checkpoint),
        palette=colors,
        tokenizer=manifest.tokenizer,
        classes=manifest.classes,
        trained=(manifest.step, manifest.samples_seen),
        words=manifest.words,
        origin=manifest.origin,
        inside={name: source / name for name in inside},
    )


_AGAIN = "export the run, or download the folder, again"


def _whole_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of an exported folder; raise UserError unless its files are whole."""
    if not (folder / "config.yaml").exists():
        raise missing_file(folder / "config.yaml", _AGAIN)
    if latest_checkpoint(folder) is None:
        raise missing_file(folder / "checkpoints" / "latest", _AGAIN)
    checkpoint = chosen_checkpoint(folder)
    for name, stored in read_manifest(checkpoint).files.items():
        # Weights are at the top of the folder, which a checkpoint names relative to itself.
        path = Path(os.path.normpath(checkpoint / name))
        if path.exists():
            require_readable(path)
        if damage := file_damage(path, stored):
            raise UserError(f"{damage}; {_AGAIN}")
    return checkpoint


def read_hub_folder(
    folder: Path,
    *,
    model: str,
    kind: str,
    renamed: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> tuple[dict[str, Any], ReleasedTensors]:
    """Return `config.json` and the tensors of a folder of `transformers`.

    Args:
        model: the class of transformers whose tensors are wanted.
        kind: its `model_type`.
        renamed: gives the tensors the names that the form's table has.

    Raises:
        UserError: a file is missing or damaged, or it is a folder of another type.
    """
    settings = read_json(folder / SETTINGS)
    found = settings.get("model_type", kind)
    if found != kind:
        raise UserError(f"{folder / SETTINGS}: this is a folder of {found!r}, not of {kind!r}")
    classes = settings.get("architectures")
    saved = ", ".join(map(str, classes)) if isinstance(classes, list) else ""
    tensors = renamed(read_hub_weights(folder))
    return settings, ReleasedTensors(
        tensors, source=folder, model=model, saved=saved, implied=f"{SETTINGS} implies"
    )


def read_hub_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's `model.safetensors`, or of the files that its index lists.

    Raises:
        UserError: it has neither; pickled weights are not opened.
    """
    whole, index = folder / WEIGHTS, folder / f"{WEIGHTS}.index.json"
    if whole.exists() or not index.exists():
        return read_tensors(whole)
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index}: has no weight_map of names of files")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise UserError(f"{index}: names a file outside of the folder, {name}")
        if not (folder / name).exists():
            raise UserError(f"{index}: lists {name}, which is missing from the folder")
        tensors |= read_tensors(folder / name)
    missing = [name for name in files if name not in tensors]
    if missing:
        raise UserError(f"{index}: lists {missing[0]}, which {files[missing[0]]} does not have")
    return tensors


def missing_file(
    path: Path, advice: str = "save the model with transformers' save_pretrained(DIR)"
) -> UserError:
    """Return the error for a folder without a file: it says what the folder has instead."""
    folder = path.parent
    if not folder.is_dir():
        what = "a file, not a folder of a model" if folder.exists() else "no such folder"
        return UserError(f"{folder}: {what}")
    # The newest, if the Hub's cache has several.
    if snapshots := sorted(
        (folder / "snapshots").glob("*/"), key=lambda each: each.stat().st_mtime
    ):
        return UserError(f"{folder}: a folder of the Hub's cache; the files are in {snapshots[-1]}")
    found = ", ".join(sorted(each.name for each in folder.iterdir())[:8])
    return UserError(f"{path}: missing; the folder has {found or 'no files'}; {advice}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, all floats as float32, in which we compute.

    Raises:
        UserError: it is missing or not whole.
    """
    if not path.exists():
        raise missing_file(path)
    try:
        stored = load_tensors(path)
    except OSError as error:
        raise UserError(describe_os_error(error)) from None
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an `.npz` file in float32; only those under `params/`, if there are any.

    Raises:
        UserError: the file is missing or is not such an archive; pickled arrays are not opened.
    """
    try:
        require_readable(path)
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with archive:
            inner = [name for name in archive.files if "params/" in name]
            return {
                name.removeprefix("params/"): torch.from_numpy(np.array(archive[name], np.float32))
                for name in inner or archive.files
            }
    except UserError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        # NumPy takes any other content for pickled objects, and advises to open them.
        is_pickled = "pickle" in str(error)
        reason = (
            "it holds other content, and pickled objects are not opened" if is_pickled else error
        )
        raise UserError(f"{path} is not an .npz file of arrays: {reason}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises UserError where it is none."""
    if not path.exists():
        raise missing_file(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not a JSON file") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values


def check_sizes(path: Path, settings: Mapping[str, Any], *keys: str) -> None:
    """Raise UserError unless these keys of the `config.json` at `path` are positive integers."""
    for key in keys:
        size = settings.get(key)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(f"{path}: {key} is {size!r}, not a positive integer")


def check_fixed(path: Path, settings: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise UserError if a key of `config.json` is there and has another value than `fixed`."""
    for key, wanted in fixed.items():
        if settings.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {settings[key]!r}; only {wanted!r} can be imported")


def check_divides(path: Path, settings: Mapping[str, Any], whole: str, part: str) -> None:
    """Raise UserError if one size of `config.json` is not a multiple of another."""
    if settings[whole] % settings[part]:
        raise UserError(
            f"{path}: {whole} {settings[whole]} is not divisible by {part} {settings[part]}"
        )
