"""A headless Chromium controlled through its debugging pipe, without a library or a port."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser():
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page in a browser; `messages` are all events since it was opened."""

    def __init__(self, commands, events, process):
        self.commands, self.events, self.process = commands, events, process
        self.buffer, self.number, self.messages, self.session = b"", 0, [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command and return its result."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        answer = self.wait(lambda message: message.get("id") == self.number)
        assert "error" not in answer, answer
        return answer["result"]

    def wait(self, matches, timeout=120.0):
        """Read messages until one matches, and return it."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            while b"\0" not in self.buffer:
                chunk = os.read(self.events, 1 << 16)
                assert chunk, "the browser has ended"
                self.buffer += chunk
            line, self.buffer = self.buffer.split(b"\0", 1)
            message = json.loads(line)
            self.messages.append(message)
            if matches(message):
                return message
        raise TimeoutError

    def open(self, url):
        """Open a page and wait until it is loaded."""
        self.messages.clear()
        self.call("Page.navigate", url=url)
        if not any(message.get("method") == "Page.loadEventFired" for message in self.messages):
            self.wait(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def events_of(self, method):
        """Return the parameters of all events of a kind."""
        return [message["params"] for message in self.messages if message.get("method") == method]


@contextlib.contextmanager
def open_browser(path, profile):
    """Start a browser; close it at the end of the context."""
    command_read, command_write = os.pipe()
    event_read, event_write = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    # Chromium reads commands from descriptor 3 and writes events to 4.
    pipes = f'exec "$@" 3<&{command_read} 4>&{event_write}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", pipes, "browser", path, *options, f"--user-data-dir={profile}"],
        pass_fds=(command_read, event_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(command_read)
    os.close(event_write)
    try:
        browser = Browser(command_write, event_read, process)
        yield browser
        browser.session = None
        browser.call("Browser.close")
        # Headless Chromium sometimes hangs after it has closed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(command_write)
        os.close(event_read)
