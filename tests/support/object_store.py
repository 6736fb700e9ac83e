"""A real S3 server, and a proxy in front of it that fails as networks and stores do."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

HOST = "127.0.0.1"
BUSY = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>busy</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>no</Message></Error>"

Fault = Callable[["Request"], None]


@dataclass
class Request:
    """What a client asks for, and the answer, which a fault changes.

    Attributes:
        turn: how often this file was asked for before.
        send: bytes of the body to send before the connection is cut; None: all.
    """

    name: str
    turn: int
    status: int
    body: bytes
    send: int | None = None


@dataclass
class Store:
    """A server's address, what was asked of it, and what shall go wrong.

    Attributes:
        url: of the proxy.
        server: of the server itself, as host and port.
        asked: GET requests of each file.
        fault: changes answers.
    """

    url: str
    server: tuple[str, int]
    asked: Counter[str] = field(default_factory=Counter)
    fault: Fault | None = None

    def upload(self, folder: Path, bucket: str) -> None:
        """Copy the files of a folder into a new bucket."""
        connection = http.client.HTTPConnection(*self.server, timeout=30)
        for name in ["", *(path.name for path in folder.iterdir())]:
            body = (folder / name).read_bytes() if name else b""
            public = {"x-amz-acl": "public-read"}
            connection.request("PUT", f"/{bucket}/{name}".rstrip("/"), body, public)
            answer = connection.getresponse()
            assert answer.status == 200, (name, answer.read())
            answer.read()
        connection.close()


@contextmanager
def open_store(log: Path) -> Iterator[Store]:
    """Run a server and its proxy on free ports."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as moto:
        try:
            _wait_for(moto, port, log)
            with _proxy((HOST, port)) as store:
                yield store
        finally:
            moto.kill()


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

    def do_GET(self) -> None:
        store, is_get = self.server.store, self.command == "GET"
        answer, body = self._answer()
        name = self.path.partition("?")[0].rpartition("/")[2]
        with self.server.guard:
            request = Request(name, store.asked[name], answer.status, body)
            store.asked[name] += is_get
        if store.fault is not None:
            store.fault(request)
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

    def _answer(self) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.server.store.server, timeout=30)
        connection.request(self.command, self.path, headers=dict(self.headers))
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
        self.store, self.guard = Store(f"http://{HOST}:{self.server_port}", server), Lock()


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
