"""Read tars member by member, and detect where they are damaged or truncated.

Webdataset tars, as written by img2dataset, have jpg, json and txt members with a common key. Each
tar is one part of a source and becomes one shard, so huge collections are never listed.

webdataset's own `group_by_keys` decides which members form a sample. It is applied to headers:
webdataset's expander would read every member into memory, however large, stop silently at a damaged
header as if the tar ended there, and skip links.

Tars at a URL are fetched one at a time by each worker, into an unnamed temporary file (`TMPDIR`),
and read once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from data_tools.selection import ImageSelection
from data_tools.sources import (
    CUT_OFF,
    MAX_FILE_BYTES,
    TOO_LARGE,
    UNREADABLE,
    WRONG_LABEL,
    Refuse,
    SourceImage,
    SourcePart,
    errors_named,
    is_of_one_file,
    printable,
    size_and_fault,
)
from megavis.config.arguments import path_of
from megavis.config.errors import UserError
from megavis.data.format.folders import IMAGE_SUFFIXES, START_BYTES, Contents, looks_like_image
from megavis.data.loading.remote import is_remote
from megavis.data.loading.stores import Store

_BLOCK = tarfile.BLOCKSIZE
_CHUNK_BYTES = 1 << 20
EMPTY = "empty tar"
COMPRESSED = "compressed tar: unpack it first"
DAMAGED = "damaged tar: what follows in it is lost"
CUT = "tar cut off: what follows in it is lost"
# How files of gzip, bzip2, xz and zstd start.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_SPARSE = "sparse member of a tar"
_LINK = "link in a tar"
_LABEL = ".cls"
# Suffixes of members that are not images; of others the first bytes are read.
_NEVER_IMAGES = frozenset((_LABEL, ".json", ".txt", ".npy", ".npz", ".tar"))
_MAX_LABEL_BYTES = 64
# Members that webdataset's expander skips, by its own definition.
_META = re.compile(r"__[^/]*__($|/)")
_SECOND_IMAGE = "another image of its sample"
_SECOND_NAME = "another file of its sample with this suffix"


class BrokenTarError(Exception):
    """A damaged or truncated tar; the message is the reason under which it is counted."""


def tar_members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the files and links of an uncompressed tar in order, reading only headers.

    Hidden files, including the entries that some systems add for attributes, are skipped;
    `why_not` tells which of the others cannot be read. The caller may seek between two members.

    Raises:
        BrokenTarError: at the first damage, after what precedes it. `tarfile` alone would end
            silently at a damaged header, and at zeros that look like the end.
        OSError: reading fails.
    """
    end = 0
    try:
        with tarfile.open(
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as tar:
            end = tar.offset
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # do not keep them all
                is_file = member.isreg() or member.issym() or member.islnk()
                if is_file and not member.name.split("/")[-1].startswith("."):
                    yield member
            end = tar.offset
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise BrokenTarError(_reason(str(error), file, end)) from None
    _check_end(file, end)


def why_not(member: tarfile.TarInfo) -> str:
    """Return why a member of a tar cannot be read in place; empty if it can."""
    if member.issparse():
        return _SPARSE
    return "" if member.isreg() else _LINK


def _reason(text: str, file: BinaryIO, end: int) -> str:
    if not end:  # not even one header was read
        file.seek(0)
        if file.read(_BLOCK).startswith(_COMPRESSED):
            return COMPRESSED
    if "empty file" in text:
        return EMPTY
    return CUT if "unexpected end" in text or "truncated" in text else DAMAGED


def _check_end(file: BinaryIO, end: int) -> None:
    """Raise BrokenTarError if the blocks from `end` do not finish a tar."""
    file.seek(end)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise BrokenTarError(CUT)
    while block:
        if block.count(0) != len(block):
            raise BrokenTarError(DAMAGED)
        block = file.read(_CHUNK_BYTES)


class Stretch:
    """A read-only view of a range of another file: a tar inside a tar."""

    def __init__(self, file: BinaryIO, *, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._place = 0

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` bytes."""
        left = max(self._length - self._place, 0)
        self._file.seek(self._start + self._place)
        content = self._file.read(left if count < 0 else min(count, left))
        self._place += len(content)
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        """Change the position; see `io.IOBase.seek`."""
        origin = {0: 0, 1: self._place, 2: self._length}[whence]
        self._place = origin + offset
        return self._place

    def tell(self) -> int:
        """Return the position in the range."""
        return self._place


def is_tar(path: Path) -> bool:
    """Return whether a file starts like an uncompressed tar, or is empty. Raises OSError."""
    with errors_named(path), path.open("rb") as file:
        block = file.read(_BLOCK)
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    # Missing in tarfile's type stubs.
    except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
        return True
    except tarfile.HeaderError:
        return False
    return True


def first_member(path: Path) -> str:
    """Return the name of the first file in a tar; empty if there is none. Raises OSError."""
    with errors_named(path), path.open("rb") as file:
        try:
            return next((member.name for member in tar_members(file)), "")
        except BrokenTarError:
            return ""


@dataclass(frozen=True)
class TarPart:
    """One tar.

    Attributes:
        path: path of the tar; its name, if it is at a URL.
        num_bytes: size of the tar.
        number: index among the tars of the source.
        num_files: number of images according to img2dataset's `_stats.json`; 0 without it.
        num_classes: upper bound of labels (`.cls` members); 0 to count them as unread.
        selection: images to select.
        store: store of its folder, if that is a URL.
        refused: reason for rejecting it, if known without reading it.
    """

    path: Path
    num_bytes: int
    number: int
    num_files: int
    num_classes: int
    selection: ImageSelection
    store: Store | None = None
    refused: str = ""

    def pictures(self, refuse: Refuse, unread: Counter[str] | None = None) -> Iterator[SourceImage]:
        """Yield the images of the tar in order.

        Raises OSError if its disk has failed: that is no damage, and a rerun reads it again.
        """
        if self.refused:
            refuse(self.path.name, self.refused)
            return
        try:
            yield from self._pictures(refuse, Counter() if unread is None else unread)
        except OSError as error:  # images before it are kept
            if not self._is_only_mine(error):
                raise
            refuse(self.path.name, UNREADABLE)

    def _pictures(self, refuse: Refuse, unread: Counter[str]) -> Iterator[SourceImage]:
        dropped = self.selection.dropped(self.number)
        with self._opened() as file:
            for place, sample in enumerate(self._samples(file, refuse, unread)):
                name = self._name(sample.image)
                if not self.selection.has(name):
                    continue
                key = f"{self.number:06d}-{place:06d}"
                reason = dropped.get(name) or dropped.get(key) or self._refusal(file, sample)
                content = None if reason else self._read(file, sample.image)
                if content is None:
                    refuse(name, reason or UNREADABLE)
                    continue
                label = -1 if sample.label is None else int(sample.label)
                yield SourceImage(key, name, label, content)

    def _read(self, file: BinaryIO, image: tarfile.TarInfo) -> bytes | None:
        """Read an image; None if only it cannot be read. Raises OSError if the disk has failed."""
        try:
            with errors_named(self.path):
                return _content(file, image, MAX_FILE_BYTES)
        except OSError as error:
            if not self._is_only_mine(error):
                raise
            return None

    def _is_only_mine(self, error: OSError) -> bool:
        """Return whether an error is about this tar, while its disk is there."""
        is_mine = self.store is None and error.filename == str(self.path)
        return is_mine and is_of_one_file(error, self.path.parent)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        if self.store is None:
            with errors_named(self.path), self.path.open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as fetched:
            self.store.copy(self.path.name, fetched, size=self.num_bytes)
            fetched.seek(0)
            yield fetched

    def _name(self, member: tarfile.TarInfo) -> str:
        return f"{self.path.name}/{printable(member.name)}"

    def _samples(self, file: BinaryIO, refuse: Refuse, unread: Counter[str]) -> Iterator[_Sample]:
        """Yield the samples that have an image."""
        for members in self._grouped(file, refuse, unread):
            image, label = None, None
            for member in members:
                suffix = _suffix(member)
                if suffix == _LABEL and self.num_classes:
                    text = _content(file, member, _MAX_LABEL_BYTES)
                    label = text.decode("utf-8", "replace").strip()
                elif not _is_image(file, member, suffix):
                    unread[printable(suffix)] += 1
                elif image is not None:
                    refuse(self._name(member), _SECOND_IMAGE)
                else:
                    image = member
            if image is not None:
                yield _Sample(image, label)

    def _grouped(
        self, file: BinaryIO, refuse: Refuse, unread: Counter[str]
    ) -> Iterator[list[tarfile.TarInfo]]:
        """Yield the members of each sample, which webdataset finds by their names."""
        # Imported here, since other layouts do not need it.
        from webdataset.tariterators import base_plus_ext, group_by_keys

        last: tarfile.TarInfo | None = None

        def named() -> Iterator[dict[str, object]]:
            nonlocal last
            for last in self._members(file, refuse):
                if _META.match(last.name) or base_plus_ext(last.name)[0] is None:
                    unread[printable(_suffix(last)) or "without a suffix"] += 1
                else:
                    yield {"fname": last.name, "data": last, "__url__": ""}

        def second(error: Exception) -> bool:
            if not isinstance(error, ValueError):
                raise error
            assert last is not None
            refuse(self._name(last), _SECOND_NAME)
            return True

        for sample in group_by_keys(named(), handler=second):
            yield [member for member in sample.values() if isinstance(member, tarfile.TarInfo)]

    def _members(self, file: BinaryIO, refuse: Refuse) -> Iterator[tarfile.TarInfo]:
        try:
            with errors_named(self.path):
                yield from tar_members(file)
        except BrokenTarError as error:  # members before the damage are kept
            refuse(self.path.name, str(error))
        except OSError as error:
            if not self._is_only_mine(error):
                raise
            refuse(self.path.name, UNREADABLE)

    def _refusal(self, file: BinaryIO, sample: _Sample) -> str:
        """Return why a sample is rejected; empty if it is not."""
        image, label = sample.image, sample.label
        if image.size > MAX_FILE_BYTES:
            return TOO_LARGE
        if reason := why_not(image):
            return reason
        if image.offset_data + image.size > os.fstat(file.fileno()).st_size:
            return CUT_OFF
        known = label is None or (label.isdecimal() and int(label) < self.num_classes)
        return "" if known or label == "-1" else WRONG_LABEL


@dataclass(frozen=True)
class TarSource:
    """Webdataset tars, paths and sizes in order of names, and a selection of their images.

    `store` is the store of their folder, if that is a URL; paths are then names.
    """

    description: str
    root: Path | str
    tars: tuple[tuple[Path, int], ...]
    class_names: tuple[str, ...] = ()
    selection: ImageSelection = ImageSelection()
    store: Store | None = None
    label_column: ClassVar[str] = ""

    @property
    def sha256(self) -> str:
        """Identity of the names and sizes, wherever the tars are, and of the selection."""
        digest = hashlib.sha256(self.selection.identity.encode())
        for path, num_bytes in self.tars:
            digest.update(f"{path.name}\0{num_bytes}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def parts(self, *, files_per_part: int, seed: int) -> list[SourcePart]:
        """Return one part per tar, regardless of the arguments.

        Raises OSError if a tar is gone since it was listed.
        """
        return [
            TarPart(
                path,
                size,
                number,
                0 if self.store else stated_counts(path).get("successes", 0),
                len(self.class_names),
                self.selection,
                self.store,
                "" if self.store else size_and_fault(path)[1],
            )
            for number, (path, size) in enumerate(self.tars)
        ]


@dataclass(frozen=True)
class _Sample:
    """The members of one key: its first image, and the text of its label."""

    image: tarfile.TarInfo
    label: str | None


def list_tars(
    place: Path | str, *, selection: ImageSelection, class_names: Sequence[str] | None = None
) -> TarSource:
    """List webdataset tars: a folder, a tar, or a pattern such as `web/{00000..00123}.tar`.

    Each may be a URL that fsspec opens; a folder of `https://` must be given as a pattern. Without
    `class_names`, labels are ignored. Raises UserError if there is no such tar, or two have the
    same name, and OSError if a store does not answer.
    """
    store = None
    if isinstance(place, str):
        folder, _, last = place.rpartition("/")
        is_folder = not last.lower().endswith(".tar")
        store = Store(place if is_folder else folder)
        tars = _stored_tars(store, None if is_folder else last)
    else:
        tars = tuple((path, path.stat().st_size) for path in _local_tars(place))
    if not tars or len({path.name for path, _ in tars}) < len(tars):
        raise UserError(f"{place} must match one or more tars with different names")
    return TarSource(
        f"{len(tars)} webdataset tars of {printable(Path(place).name)}",
        place,
        tars,
        tuple(class_names or ()),
        selection,
        store,
    )


def _local_tars(place: Path) -> list[Path]:
    if place.is_dir():
        paths = [place / name for name in Contents.of(place).tars]
    else:
        paths = [Path(name) for name in expanded(str(place))]
    if missing := [path for path in paths if not path.is_file()]:
        raise UserError(f"{missing[0]} does not exist")
    return paths


def _stored_tars(store: Store, pattern: str | None) -> tuple[tuple[Path, int], ...]:
    """Return names and sizes of the tars of a URL, all or those of a pattern."""
    if pattern is not None:
        sizes = {name: store.size(name) for name in expanded(pattern)}
    else:
        sizes = {name: size for name, size in store.sizes().items() if _is_named_tar(name)}
    return tuple((Path(name), sizes[name]) for name in sorted(sizes))


def _is_named_tar(name: str) -> bool:
    return name.lower().endswith(".tar") and not name.startswith(".")


def expanded(pattern: str) -> list[str]:
    """Return the names of a pattern with braces; a pattern without braces is a name."""
    if "{" not in pattern:
        return [pattern]
    from braceexpand import braceexpand

    return list(braceexpand(pattern))


def source_place(text: str) -> Path | str:
    """Parse a URL, which is returned as it is, or a path. Raises argparse.ArgumentTypeError."""
    return text if is_remote(text) else path_of(text)


def _suffix(member: tarfile.TarInfo) -> str:
    """Return the last suffix of a member in lower case, with its dot."""
    return os.path.splitext(member.name)[1].lower()


def _is_image(file: BinaryIO, member: tarfile.TarInfo, suffix: str) -> bool:
    """Return whether a member is an image, by its suffix or else by its first bytes."""
    if suffix in IMAGE_SUFFIXES or suffix in _NEVER_IMAGES:
        return suffix in IMAGE_SUFFIXES
    return member.isreg() and looks_like_image(_content(file, member, START_BYTES))


def _content(file: BinaryIO, member: tarfile.TarInfo, limit: int) -> bytes:
    # The iterator over members seeks by itself afterwards.
    file.seek(member.offset_data)
    return file.read(min(member.size, limit))


def stated_counts(path: Path) -> dict[str, int]:
    """Return img2dataset's counts for a tar, from its `_stats.json`; empty without it."""
    try:
        stats = json.loads(path.with_name(f"{path.stem}_stats.json").read_bytes())
        return {name: value for name, value in stats.items() if isinstance(value, int)}
    except (OSError, ValueError, AttributeError):
        return {}
