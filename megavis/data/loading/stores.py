"""Files of a folder at a URL: `s3://`, `gs://`, `https://` by fsspec, `pipe:` by gopen.

fsspec's libraries find credentials and endpoints where the user's other tools do. Their retries
differ: s3fs retries some errors but not a 500, gcsfs most, HTTP none, and none knows a file's
expected hash. They are asked only once, for a block at a time, and this file decides on retries.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from megavis.config.errors import UserError

ATTEMPTS = 6
PAUSE_SECONDS, MOST_SECONDS = 0.5, 30.0
"""Upper bounds in seconds of the first pause, doubled after each failure, and of all pauses."""

_BLOCK_BYTES = 16 << 20
_FILE = "{file}"
_PIPE = "pipe:"
_STALLED_SECONDS = 60.0
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Libraries whose exceptions have no common class and come from a network or a server.
_CLIENTS = {
    *("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "http", "httpcore", "httpx"),
    *("httpx2", "paramiko", "requests"),
}
_LOGIN = {
    "s3": "AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws or the machine's role, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "https": "whether the URL needs a login or a fresh signature",
}
_NO_LOGIN = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_PASSING = {408, 425, 429}
"""Statuses below 500 that are worth retrying: timeout, too early, too many requests."""


class AbsentFileError(UserError):
    """A file, folder or bucket does not exist."""


class DamagedDownloadError(OSError):
    """The bytes do not match the manifest."""


class Store:
    """The files of a folder at a URL; thread-safe, and picklable.

    Args:
        url: `{file}` in it is replaced by a file's name; otherwise a slash and the name are
            appended.
        attempts: number of attempts for a block before a file is given up.
    """

    def __init__(self, url: str, *, attempts: int = ATTEMPTS) -> None:
        self.url, self._attempts = url, attempts
        self._lock = Lock()
        self._system: Any = None

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.url,)

    def url_of(self, name: str) -> str:
        """Return the URL of a file."""
        if _FILE in self.url:
            return self.url.replace(_FILE, name)
        return f"{self.url.rstrip('/')}/{name}"

    def copy(
        self, name: str, file: BinaryIO, *, size: int | None = None, sha256: str | None = None
    ) -> None:
        """Write a file's content into an open file, from its beginning.

        Transfer failures are retried after random pauses with a doubling bound, so that processes
        that failed together do not retry together. Blocks that have arrived are kept; with a wrong
        size or hash, all are fetched again.

        Args:
            size: size in bytes, if known; the file is then read in blocks.
            sha256: hash of the content, if known.

        Raises:
            UserError: the file does not exist, or may not be read.
            OSError: it cannot be fetched after all attempts, or cannot be written.
        """
        url = self.url_of(name)
        digest, done, furthest, failures = hashlib.sha256(), 0, 0, 0
        blocks = self._blocks(url, 0, size)
        while True:
            try:
                block = next(blocks, None)
                if block is None:
                    _check(digest.hexdigest(), done, size, sha256)
                    file.truncate()
                    return
            except Exception as error:
                failures += 1
                _give_up_or_wait(url, error, failures, self._attempts)
                if isinstance(error, DamagedDownloadError) or url.startswith(_PIPE):
                    digest, done = hashlib.sha256(), 0
                    file.seek(0)
                blocks = self._blocks(url, done, size)
                continue
            file.write(block)
            digest.update(block)
            done += len(block)
            if done > furthest:  # progress: earlier failures no longer count
                furthest, failures = done, 0

    def put(self, name: str, path: Path) -> None:
        """Upload a file, which replaces one of this name once the upload is complete.

        Retries like `copy`.

        Raises:
            UserError: the store may not be written.
            OSError: it cannot be written after all attempts.
        """
        url = self.url_of(name)
        self._answer(url, lambda system: system.put_file(str(path), url), "written")

    def remove(self, name: str) -> None:
        """Delete a file. Raises as `put`, and AbsentFileError."""
        url = self.url_of(name)
        self._answer(url, lambda system: system.rm_file(url), "written")

    def sizes(self) -> dict[str, int]:
        """Return the current size in bytes of each file of the folder. Raises as `copy`."""
        entries = self._answer(self.url, lambda system: _fresh(system).ls(self.url, detail=True))
        files = (
            entry for entry in entries if entry["type"] == "file" and entry["size"] is not None
        )
        return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in files}

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raises as `copy`, and UserError if unknown."""
        url = self.url_of(name)
        size = self._answer(url, lambda system: _fresh(system).info(url)["size"])
        if size is None:
            raise UserError(f"{url} is sent without its size, which is needed: copy it first")
        return int(size)

    def _answer(self, url: str, ask: Callable[[Any], Any], what: str = "fetched") -> Any:
        """Return a file system's answer, with as many attempts as `copy` has for a block."""
        if url.startswith(_PIPE):
            raise UserError(
                f"{url}: the output of a command cannot be listed: give s3://, gs:// ..."
            )
        for failures in itertools.count(1):
            try:
                return ask(self._opened(url))
            except Exception as error:
                _give_up_or_wait(url, error, failures, self._attempts, what)
        raise AssertionError("the loop ends by itself")

    def _blocks(self, url: str, start: int, size: int | None) -> Iterator[bytes]:
        """Yield the content from byte `start` on; raises the libraries' exceptions."""
        if url.startswith(_PIPE):
            yield from _piped(url)
            return
        system = self._opened(url)
        if size is None:
            yield system.cat_file(url, start=0)  # without `start`, s3fs asks for the size first
            return
        while start < size:
            asked = min(_BLOCK_BYTES, size - start)
            block = system.cat_file(url, start=start, end=start + asked)
            if len(block) > asked:  # no support for ranges: the server has sent the whole file
                block = block[start:]
            if len(block) < asked and start + asked <= size:
                raise OSError(f"it sends {start + len(block)} of {size} bytes")
            yield block
            start += len(block)

    def _opened(self, url: str) -> Any:
        """Return the file system of a URL, opened once; its methods take URLs."""
        with self._lock:
            if self._system is None:
                self._system = _open_system(url)
        return self._system


def _fresh(system: Any) -> Any:
    """Return a file system with its listings forgotten, since others may change the folders."""
    system.invalidate_cache()
    return system


def _open_system(url: str) -> Any:
    # Imported here, since local folders are read without them.
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        own = conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **own}
    elif scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        # The default ends any transfer after five minutes.
        limits = ClientTimeout(
            total=None, sock_connect=_STALLED_SECONDS, sock_read=_STALLED_SECONDS
        )
        options["client_kwargs"] = {"timeout": limits}
    try:
        system = url_to_fs(url, **options)[0]
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        what = f"run `pip install 'megavis[{extra}]'`" if extra else str(error)
        raise UserError(f"{scheme}:// cannot be read here: {what}") from None
    except ValueError as error:
        raise UserError(f"{url} cannot be read: {error}") from None
    if scheme in ("s3", "s3a"):
        system.retries = 1
    return system


def _piped(url: str) -> Iterator[bytes]:
    """Yield the output of a command; raises OSError if it fails."""
    from webdataset.gopen import gopen

    with gopen(url, "rb") as stream:
        while block := stream.read(1 << 20):
            yield block


def _check(digest: str, done: int, size: int | None, sha256: str | None) -> None:
    if size is not None and done != size:
        raise DamagedDownloadError(f"it has {done} bytes, and the manifest says {size}")
    if sha256 is not None and digest != sha256:
        raise DamagedDownloadError("its SHA-256 differs from the manifest: truncated or changed")


def _give_up_or_wait(
    url: str, error: Exception, failures: int, attempts: int, what: str = "fetched"
) -> None:
    """Pause after a failure; raise UserError at once if a retry cannot help.

    Raises OSError after as many failures as attempts. Errors other than transfer failures are
    re-raised.
    """
    if isinstance(error, UserError):
        raise error
    error = _reason_of_absence(error)
    if isinstance(error, FileNotFoundError) or _status(error) in (404, 410):
        check = "check the folder's name, and that its upload has finished"
        if what == "written":
            check = "check the name of the bucket"
        raise AbsentFileError(f"{url} does not exist: {check}") from None
    refusal = _refusal(url, error, "read" if what == "fetched" else what)
    if refusal is not None:
        raise UserError(refusal) from None
    if not _is_of_the_way(error):
        raise error
    if failures >= attempts:
        reason = _short_reason(error)
        raise OSError(f"{url} cannot be {what} after {failures} attempts: {reason}") from error
    pause = min(MOST_SECONDS, PAUSE_SECONDS * 2 ** (failures - 1))
    # Not from a generator used for other draws.
    time.sleep(pause * secrets.SystemRandom().uniform(0.5, 1.0))


def _reason_of_absence(error: Exception) -> Exception:
    """Return why a file seems not to exist: fsspec says so of any HTTP error, and names its cause.

    The file does not exist only if the cause has status 404 or 410.
    """
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    is_of_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if is_of_http or isinstance(cause, TimeoutError) else error


def _refusal(url: str, error: Exception, what: str) -> str | None:
    """Return why a file may not be read or written; None if a retry may succeed."""
    scheme = url.partition("://")[0]
    login = _LOGIN.get({"s3a": "s3", "gcs": "gs", "http": "https"}.get(scheme, scheme), "its mode")
    status = _status(error)
    if isinstance(error, PermissionError) or status in (401, 403) or "Forbidden" in str(error):
        # S3 returns 403 for an absent file too, if the user may not list the bucket.
        may_not = f"may not be {what}, or does not exist"
        return f"{url} {may_not} ({_short_reason(error)}): check {login}"
    if type(error).__name__ in _NO_LOGIN:
        return f"{url} needs credentials ({_short_reason(error)}): check {login}"
    if status is not None and 400 <= status < 500 and status not in _PASSING:
        return f"{url} is refused with status {status}: {_short_reason(error)}"
    return None


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error, if any; libraries keep it in different places."""
    # By name: importing an unused client, which may not be installed, only for its error class
    # would take seconds. The type checker therefore does not know these attributes.
    library, kind = type(error).__module__.partition(".")[0], type(error).__name__
    if library == "aiohttp" and kind == "ClientResponseError":
        return error.status  # type: ignore[attr-defined]
    if library == "gcsfs" and kind == "HttpError":
        return int(error.code)  # type: ignore[attr-defined]
    cause = error.__cause__  # s3fs translates botocore's
    if type(cause).__name__ == "ClientError":
        return cause.response["ResponseMetadata"]["HTTPStatusCode"]  # type: ignore[union-attr]
    return None


def _is_of_the_way(error: Exception) -> bool:
    """Return whether a network, server or command failed, rather than our code."""
    modules = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    return isinstance(error, OSError | TimeoutError) or not modules.isdisjoint(_CLIENTS)


def _short_reason(error: Exception) -> str:
    # webdataset's message repeats all arguments of the command.
    status = re.search(r": exit (-?\d+) \(read\)", str(error))
    if status:
        return f"the command exited with status {status[1]}"
    return str(error).partition("\n")[0] or type(error).__name__
