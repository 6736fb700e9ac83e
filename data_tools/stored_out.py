"""`--out` at a URL: shards are written in a temporary folder, uploaded one by one, and deleted.

Files in a store are complete or absent, so the rules for local folders apply: a shard is finished
once its JSON index exists, which follows its tar, and the data set once its manifest exists. A
rerun asks the store what is finished. Local disk (`TMPDIR`) holds only the tars that workers are
writing and the JSON indexes of their shards, and at the end the JSON indexes of all shards, from
which the index of samples is made.
"""

from __future__ import annotations

import argparse
import errno
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megavis.config.arguments import path_of
from megavis.config.errors import NOT_ALLOWED, UserError
from megavis.data.format.files import atomic_writer
from megavis.data.format.manifest import MANIFEST_NAME
from megavis.data.format.shards import index_path
from megavis.data.loading.remote import is_remote
from megavis.data.loading.stores import AbsentFileError, Store

_READ_ONLY = ("pipe:", "http://", "https://")
# Other errors are the disk's.
_NOT_A_PLACE = (*NOT_ALLOWED, errno.ENAMETOOLONG)


def local_folder(text: str) -> Path:
    """Parse `--out` of a command that writes no URL. Raises argparse.ArgumentTypeError."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL: this command writes to a local folder")
    return _folder_at(text)


def any_folder(text: str) -> Path | str:
    """Parse `--out` of a command that also writes to stores. Raises argparse.ArgumentTypeError."""
    if text.startswith(_READ_ONLY):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: give s3:// or gs://")
    return text if is_remote(text) else _folder_at(text)


def _folder_at(text: str) -> Path:
    path = path_of(text)
    try:
        is_file = path.exists() and not path.is_dir()
    except OSError as error:
        if error.errno not in _NOT_A_PLACE:
            raise
        raise argparse.ArgumentTypeError(
            f"{text}: {error.strerror}; name a folder that can be written"
        ) from None
    if is_file:
        raise argparse.ArgumentTypeError(f"{text} is a file; name a folder")
    return path


@contextmanager
def local_out(arguments: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the arguments with a local `out`, and its destination as `url`; "" if it is local."""
    if not isinstance(arguments.out, str):
        yield argparse.Namespace(**{**vars(arguments), "url": ""})
        return
    with tempfile.TemporaryDirectory(prefix="megavis-out-") as folder:
        local = {"out": Path(folder), "url": arguments.out.rstrip("/")}
        yield argparse.Namespace(**{**vars(arguments), **local})


def place(arguments: argparse.Namespace, name: str) -> str:
    """Return path or URL of a file of `--out`."""
    return f"{arguments.url}/{name}" if arguments.url else str(arguments.out / name)


def folder_of(url: str, folder: str) -> Store | None:
    """Return the store of a shard folder below `--out`; None for one that stays on this machine."""
    if not url or Path(folder).is_absolute():
        return None
    return Store(f"{url}/{folder}".rstrip("/"))


def finished_shards(folder: Path, store: Store | None) -> Iterator[Path]:
    """Yield the JSON indexes of finished shards, fetched from a store one by one."""
    if store is None:
        yield from folder.glob("shard-*.index.json")
        return
    for name in sorted(names_in(store)):
        if name.startswith("shard-") and name.endswith(".index.json"):
            shard = folder / f"{name.removesuffix('.index.json')}.tar"
            fetch_index(store, shard)
            yield index_path(shard)


def names_in(store: Store) -> set[str]:
    """Return the names of a folder's files; empty if it does not exist."""
    try:
        return set(store.sizes())
    except AbsentFileError:
        return set()


def fetch_index(store: Store, shard: Path) -> None:
    """Fetch the JSON index of a finished shard, unless it exists locally. Raises OSError."""
    path = index_path(shard)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # on another machine of a cluster
    try:
        with atomic_writer(path) as file:
            store.copy(path.name, file)
    except AbsentFileError:
        return


def has_tar(store: Store, name: str, num_bytes: int) -> bool:
    """Return whether a tar of this size exists. Raises OSError, and UserError if refused."""
    try:
        return store.size(name) == num_bytes
    except AbsentFileError:
        return False


def upload_shard(store: Store, shard: Path) -> None:
    """Upload a tar, if there is one, and its JSON index, which finishes it; delete the tar.

    Raises OSError and UserError, after deleting the index too.
    """
    path = index_path(shard)
    try:
        if shard.exists():
            store.put(shard.name, shard)
        store.put(path.name, path)
    except BaseException:
        path.unlink()
        raise
    finally:
        shard.unlink(missing_ok=True)


def upload_rest(arguments: argparse.Namespace, folders: Iterable[str]) -> None:
    """Upload all files in `--out` besides shards, manifests last. Raises OSError and UserError."""
    if not arguments.url:
        return
    last = []
    for folder in dict.fromkeys(("", *folders)):
        store = folder_of(arguments.url, folder)
        if store is None:
            continue
        for path in sorted((arguments.out / folder).iterdir()):
            if path.is_dir() or path.name.startswith((".", "shard-")):
                continue
            if path.name == MANIFEST_NAME:
                last.append((store, path))
            else:
                store.put(path.name, path)
    for store, path in last:
        store.put(path.name, path)


def remove_reports(arguments: argparse.Namespace) -> None:
    """Remove the reports of slices that have failed, when all are done. Raises as `Store.put`."""
    store = folder_of(arguments.url, "")
    if store is not None:
        for name in sorted(names_in(store)):
            if name.startswith("report-slice-"):
                store.remove(name)


def refuse_nested(source: Path | str, out: Path | str, what: str = "the source") -> None:
    """Raise UserError if `out` lies inside the source, or the source inside `out`.

    With a manifest, a folder around the source would be read as shards from then on.
    """
    if _lies_in(out, source):
        raise UserError(f"--out {out} lies inside {what}: choose another place")
    if _lies_in(source, out):
        raise UserError(f"--out {out} holds {what} {source}: choose a folder of its own")


def _lies_in(place: Path | str, other: Path | str) -> bool:
    if isinstance(place, str) and isinstance(other, str):
        return f"{place.rstrip('/')}/".startswith(f"{other.rstrip('/')}/")
    if isinstance(place, Path) and isinstance(other, Path):
        return place.resolve().is_relative_to(other.resolve())
    return False
