"""Select images of a source: a split by hash, without those that `filter` dropped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from data_tools.sources import FileSource, SourceFile
from megavis.config.errors import UserError

Split = Literal["all", "train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
DECISION_NAME = "report.json"
_HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class ImageSelection:
    """What is left out of a source.

    Attributes:
        split: `validation` is the share of pictures whose names have the lowest hashes (iGPT,
            section 3.1: 4 % of ImageNet's training set), `train` the others. Names do not depend
            on the layout, so the split does not either.
        share: of pictures in `validation`.
        filtered: the folder that `filter` wrote, if any.
        filtered_sha256: identity of its decision.
    """

    split: Split = "all"
    share: float = 0.0
    filtered: Path | None = None
    filtered_sha256: str = ""

    @property
    def identity(self) -> str:
        """What decides about the selection, as text."""
        return f"{self.split} {self.share if self.split != 'all' else 0} {self.filtered_sha256}"

    def has(self, name: str) -> bool:
        """Return whether the picture belongs to the split."""
        if self.split == "all":
            return True
        digest = hashlib.sha256(name.encode()).digest()
        in_validation = int.from_bytes(digest[:8], "big") < self.share * _HASH_RANGE
        return in_validation == (self.split == "validation")

    def dropped(self, number: int | None = None) -> dict[str, str]:
        """Return the reason of each picture that `filter` dropped, by name.

        Args:
            number: of the tar, for webdataset tars; None: of the whole source.
        """
        if self.filtered is None:
            return {}
        paths = (
            sorted(self.filtered.glob("dropped-*.jsonl"))
            if number is None
            else [self.filtered / dropped_name(number)]
        )
        return {
            line["name"]: f"filtered: {line['reason']}" for path in paths for line in _lines(path)
        }

    def of_files(self, source: FileSource) -> FileSource:
        """Return the selected part of a list of files; dropped ones stay in it, to be named.

        Raises:
            UserError: nothing is left.
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
            raise UserError(f"{source.root} has no picture in the split {self.split!r}")
        return selected

    def describe(self, description: str) -> str:
        """Return the description of a source with what is left of it."""
        if self.split != "all":
            description += f", {self.split} split of {self.share:g}"
        return description + (", filtered" if self.filtered else "")


def dropped_name(number: int) -> str:
    """Return the name of the list of what was dropped from one unit of `filter`."""
    return f"dropped-{number:06d}.jsonl"


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from map(json.loads, file)


def open_selection(split: Split, share: float, filtered: Path | None) -> ImageSelection:
    """Make a selection of what the command line says.

    Raises:
        UserError: the share is out of range, or `filtered` is not a finished folder of `filter`.
    """
    if not 0 < share < 1:
        raise UserError("--validation-share must lie between 0 and 1")
    if filtered is None:
        return ImageSelection(split, share)
    path = filtered / DECISION_NAME
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        raise UserError(f"{path} is missing: let `python -m data_tools filter` finish") from None
    return ImageSelection(split, share, filtered.resolve(), digest)


def check_made_for(selection: ImageSelection, source_sha256: str) -> None:
    """Raise UserError where `filter` looked at other pictures than those of this source."""
    if selection.filtered is None:
        return
    decision = json.loads((selection.filtered / DECISION_NAME).read_bytes())
    if decision["source"] != source_sha256:
        raise UserError(
            f"--selection {selection.filtered} was made of other pictures than these: "
            "run `python -m data_tools filter` on this source"
        )
