"""Select images of a source: a split by hash, minus those that `filter` dropped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from data_tools.sources import FileSource, SourceFile
from megavis.config.errors import UserError
from megavis.data.format.folders import find_files

Split = Literal["all", "train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
DECISION_NAME = "report.json"
MEASURED = "measurements"
"""Folder of the measurements in the folder of `filter`."""
KEY = "key"
"""Field of a dropped image of whose name another was kept; empty: reading rejects it."""
FILTERED = "filtered: "
"""Start of the reason of an image that `filter` dropped."""
DEFAULT_SHARE = 0.04
"""Share of a validation split, as in iGPT (section 3.1)."""
_HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class ImageSelection:
    """A selection of a source's images.

    Attributes:
        split: `validation` is the share of images whose names have the lowest hashes (iGPT,
            section 3.1: 4 % of ImageNet's training set), `train` the others. Names, and so the
            split, do not depend on the layout.
        share: fraction of images in `validation`.
        filtered: folder of `filter`, if any.
        filtered_sha256: identity of its decision.
    """

    split: Split = "all"
    share: float = 0.0
    filtered: Path | None = None
    filtered_sha256: str = ""

    @property
    def identity(self) -> str:
        """Everything that determines the selection, as text."""
        return f"{self.split} {self.share if self.split != 'all' else 0} {self.filtered_sha256}"

    def has(self, name: str) -> bool:
        """Return whether the image belongs to the split."""
        if self.split == "all":
            return True
        digest = hashlib.sha256(name.encode()).digest()
        in_validation = int.from_bytes(digest[:8], "big") < self.share * _HASH_RANGE
        return in_validation == (self.split == "validation")

    def dropped(self, number: int | None = None) -> dict[str, str]:
        """Return the reasons of the images that `filter` dropped, of one tar or of all.

        They are by name, or by key if another image of the name was kept; names in tars have a
        slash, which keys have not.

        Raises UserError if the folder of the lists cannot be listed.
        """
        if self.filtered is None:
            return {}
        paths = (
            find_files(self.filtered, "dropped-*.jsonl")
            if number is None
            else [self.filtered / dropped_name(number)]
        )
        return {
            line.get(KEY, line["name"]): f"{FILTERED}{line['reason']}"
            for path in paths
            for line in _lines(path)
            if line.get(KEY) != ""
        }

    def of_files(self, source: FileSource) -> FileSource:
        """Return the selected files, including dropped ones, which are reported later.

        Raises UserError if the split is empty.
        """
        if self.split == "all" and self.filtered is None:
            return source
        dropped = self.dropped()
        files: Iterable[SourceFile] = (
            file.but_refused(dropped.get(file.name, ""))
            for file in source.files
            if self.has(file.name)
        )
        selected = FileSource.of(
            files,
            description=self.describe(source.description),
            root=source.root,
            classes=source.class_names,
            extra=f"{source.sha256} {self.identity}",
            read=source.read,
        )
        if not selected.files:
            raise UserError(f"{source.root} has no image in the split {self.split!r}")
        return selected

    def describe(self, description: str) -> str:
        """Return the description of a source and its selection."""
        if self.split != "all":
            description += f", {self.split} split of {self.share:g}"
        return description + (", filtered" if self.filtered else "")


def dropped_name(number: int) -> str:
    """Return the name of the list of images dropped from a unit of `filter`."""
    return f"dropped-{number:06d}.jsonl"


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from map(json.loads, file)


def open_selection(split: Split, share: float, filtered: Path | None) -> ImageSelection:
    """Return the selection of the command line. Raises UserError if `filter` has not finished."""
    if not 0 < share < 1:
        raise UserError("--validation-share must lie between 0 and 1")
    if filtered is None:
        return ImageSelection(split, share)
    path = filtered / DECISION_NAME
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: finish `python -m data_tools filter` first") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return ImageSelection(split, share, filtered.resolve(), digest)


def check_made_for(selection: ImageSelection, source_sha256: str) -> None:
    """Raise UserError if `filter` was run on another source, or did not write the folder."""
    if selection.filtered is None:
        return
    path = selection.filtered / DECISION_NAME
    try:
        decision = json.loads(path.read_bytes())
        made_for = decision["source"] if "num_kept" in decision else None
    except (ValueError, TypeError):
        made_for = None
    if made_for is None:  # folders of shards have a report of the same name
        raise UserError(
            f"--selection: {path} is not the report of `filter`: give the folder that `python -m"
            " data_tools filter` wrote"
        )
    if made_for != source_sha256:
        raise UserError(
            f"--selection {selection.filtered} was made from other images than these: "
            "run `python -m data_tools filter` on this source"
        )
