"""A real S3 server, and a proxy in front of it that fails as networks and stores do."""

from __future__ import annotations

import gc
import http.client
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

import pytest
import s3fs
from process_state import threads_left

from megavis.data.loading import stores

HOST = "127.0.0.1"
BUSY = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>busy</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}

Fault = Callable[["Request"], None]


@dataclass
class Request:
    """What a client asks for, and the answer, which a fault changes.

    Attributes:
        turn: how often this file was asked for, or sent, before.
        is_upload: whether it is sent; then the answer that a fault gives comes from a server that
            has not stored it.
        send: bytes of the body to send before the connection is cut; None: all.
    """

    name: str
    turn: int
    status: int
    body: bytes
    send: int | None = None
    is_upload: bool = False


@dataclass
class Server:
    """A server, of which all tests of a file have the buckets.

    Attributes:
        server: host and port.
    """

    server: tuple[str, int]

    def download(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Return the files of a bucket below a prefix, by name."""
        connection = http.client.HTTPConnection(*self.server, timeout=300)

        def get(path: str) -> bytes:
            connection.request("GET", path)
            return connection.getresponse().read()

        listed = get(f"/{bucket}?list-type=2&prefix={prefix}").decode()
        names = re.findall("<Key>([^<]*)</Key>", listed)
        found = {name.removeprefix(prefix): get(f"/{bucket}/{name}") for name in names}
        connection.close()
        return found

    def upload(self, folder: Path, bucket: str) -> None:
        """Copy the files of a folder into a new bucket."""
        connection = http.client.HTTPConnection(*self.server, timeout=300)
        for name in ["", *(path.name for path in folder.iterdir())]:
            body = (folder / name).read_bytes() if name else b""
            public = {"x-amz-acl": "public-read"}
            connection.request("PUT", f"/{bucket}/{name}".rstrip("/"), body, public)
            answer = connection.getresponse()
            assert answer.status == 200, (name, answer.read())
            answer.read()
        connection.close()


@dataclass
class Store(Server):
    """A server behind a proxy, what was asked of it, and what shall go wrong.

    Attributes:
        url: of the proxy.
        asked: GET requests of each file.
        sent: PUT requests of each file.
        fault: changes answers.
        raised: by `fault`, which would otherwise look like a connection that breaks.
    """

    url: str
    asked: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    fault: Fault | None = None
    raised: list[Exception] = field(default_factory=list)


@contextmanager
def open_server(log: Path) -> Iterator[Server]:
    """Run a server on a free port."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as moto:
        try:
            _wait_for(moto, port, log)
            yield Server((HOST, port))
        finally:
            moto.kill()


@contextmanager
def open_store(server: Server, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Run a proxy, which the user's environment names until `patch` is undone.

    Each test has one of its own, which ends after the threads that read ahead for the test: those
    that are fetching would try again for long.
    """
    with _proxy(server.server) as store:
        more = {"AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true"}
        for name, value in (KEYS | more).items():
            patch.setenv(name, value)
        patch.setattr(stores, "PAUSE_SECONDS", 0.001)
        # fsspec keeps file systems, with the servers and keys of other tests.
        s3fs.S3FileSystem.clear_instance_cache()
        before = set(threading.enumerate())
        yield store
        gc.collect()  # data sets that a caught exception refers to
        assert not threads_left(before)
        assert not store.raised


def _wait_for(moto: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(600):
        assert moto.poll() is None, log.read_text()
        try:
            socket.create_connection((HOST, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(log.read_text())


class _Handler(BaseHTTPRequestHandler):
    """Passes requests on; the server that it belongs to has the store."""

    protocol_version = "HTTP/1.1"
    server: _Proxy

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self._change()

    def do_POST(self) -> None:
        self._change()

    def do_DELETE(self) -> None:
        self._change()

    def _change(self) -> None:
        """Pass on a request that changes the store, unless a fault answers it."""
        store = self.server.store
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.partition("?")[0].rpartition("/")[2]
        with self.server.guard:
            request = Request(name, store.sent[name], 0, b"", is_upload=True)
            store.sent[name] += self.command == "PUT"
        if self.command == "PUT":
            self._change_answer(request)
        headers = {}
        if not request.status:
            answer, request.body = self._answer(content)
            request.status, headers = answer.status, dict(answer.getheaders())
        self.send_response(request.status)
        for key in ("ETag", "Content-Type"):
            if key in headers:
                self.send_header(key, headers[key])
        self.send_header("Content-Length", str(len(request.body)))
        self.end_headers()
        self.wfile.write(request.body)
        self.close_connection = True

    def do_GET(self) -> None:
        store, is_get = self.server.store, self.command == "GET"
        answer, body = self._answer()
        name = self.path.partition("?")[0].rpartition("/")[2]
        with self.server.guard:
            request = Request(name, store.asked[name], answer.status, body)
            store.asked[name] += is_get
        self._change_answer(request)
        self.send_response(request.status)
        for key in ("ETag", "Last-Modified", "Content-Range", "Content-Type"):
            if answer.getheader(key):
                self.send_header(key, answer.getheader(key))
        length = str(len(request.body)) if is_get else answer.getheader("Content-Length", "0")
        self.send_header("Content-Length", length)
        self.end_headers()
        if is_get:
            self.wfile.write(request.body[: request.send])
        self.close_connection = True

    def _change_answer(self, request: Request) -> None:
        store = self.server.store
        try:
            if store.fault is not None:
                store.fault(request)
        except Exception as error:
            store.raised.append(error)
            raise

    def _answer(self, content: bytes | None = None) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.server.store.server, timeout=300)
        connection.request(self.command, self.path, content, dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client has gone, as it should after a slow answer
            super().handle()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, server: tuple[str, int]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.store, self.guard = Store(server, f"http://{HOST}:{self.server_port}"), Lock()


@contextmanager
def _proxy(server: tuple[str, int]) -> Iterator[Store]:
    with _Proxy(server) as proxy:
        thread = Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield proxy.store
        finally:
            proxy.shutdown()
            thread.join()
