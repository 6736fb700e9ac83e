"""Progress bars: only on terminals, only for long work, and never with `--quiet`."""

import io
import re
import sys
import time

import pytest
from terminal import Terminal

from megavis.commands.terminal import set_verbosity
from megavis.parallel import progress_bar
from megavis.parallel.progress_bar import is_silent, shown


@pytest.fixture
def open_terminal(monkeypatch):
    """Return a function to call in the test: pytest replaces stderr after fixtures run."""

    def opened():
        written = Terminal()
        monkeypatch.setattr(sys, "stderr", written)
        monkeypatch.setattr(progress_bar, "_SECONDS_UNTIL_SHOWN", 0.0)
        monkeypatch.delenv("TQDM_DISABLE", raising=False)
        return written

    return opened


def work(parts=4):
    for part in range(parts):
        time.sleep(0.15)  # longer than tqdm's refresh interval
        yield [part] * 2


def test_bar_shows_progress_and_remaining_time(open_terminal):
    terminal = open_terminal()
    assert list(shown(work(), "reading", total=8, size=len)) == [[k, k] for k in range(4)]
    text = terminal.getvalue()
    assert text.startswith("\rreading:")
    done = [int(each) for each in re.findall(r"\| (\d)/8 \[", text)]
    assert done == sorted(done)
    assert {2, 4, 6} & set(done)
    assert re.search(r"\[00:00<00:0\d, ", text)


def test_short_work_shows_no_bar(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setattr(progress_bar, "_SECONDS_UNTIL_SHOWN", 60.0)
    list(shown(work(2), "reading", total=4, size=len))
    assert "reading" not in terminal.getvalue()


def test_log_shows_no_bar(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(progress_bar, "_SECONDS_UNTIL_SHOWN", 0.0)
    assert len(list(shown(work(2), "reading", total=4, size=len))) == 2
    assert written.getvalue() == ""


def test_quiet_disables_bars(open_terminal, monkeypatch):
    """An explicit `disable=False` overrides TQDM_DISABLE, which `--quiet` sets."""
    from megavis.training.callbacks.callback import ShowProgress

    terminal = open_terminal()
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.setenv("PYTHONWARNINGS", "")
    assert not is_silent()
    monkeypatch.setattr("warnings.simplefilter", lambda action: None)
    monkeypatch.setattr("logging.disable", lambda level: None)
    set_verbosity(quiet=True, verbose=False)
    assert is_silent()
    list(shown(work(2), "reading", total=4, size=len))
    ShowProgress(0, 10)
    assert terminal.getvalue() == ""


def test_only_the_first_process_shows_bars(open_terminal, monkeypatch):
    terminal = open_terminal()
    monkeypatch.setenv("RANK", "1")
    assert is_silent()
    list(shown(work(2), "reading", total=4, size=len))
    assert terminal.getvalue() == ""
    monkeypatch.setenv("RANK", "0")
    assert not is_silent()
