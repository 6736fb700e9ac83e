"""Output that cannot be written in the terminal's encoding is replaced, and `python -m megavis`."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megavis.config.arguments import accept_all_text

pytestmark = pytest.mark.once


def output(encoding, *words):
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


def test_python_m_megavis_replaces_what_ascii_lacks(tiny_config):
    """With a command that does not import torch."""
    words = ["megavis", "config", "show", str(tiny_config), "output=\N{GREEK SMALL LETTER ALPHA}"]
    lines = output("ascii", *words).decode("ascii").splitlines()
    assert any(line.split()[:2] == ["output:", "?"] for line in lines)


def test_data_tools_replaces_what_latin_2_lacks(shards, tmp_path):
    folder = tmp_path / "\N{GREEK SMALL LETTER ALPHA}"
    folder.symlink_to(shards / "train")
    text = output("iso8859-2", "data_tools", "verify", str(folder)).decode("iso8859-2")
    assert f"{tmp_path}/?" in text


@pytest.mark.parametrize(
    ("encoding", "errors", "written"),
    [
        ("ascii", "strict", b"2 ? 3 ?"),
        ("utf-8", "strict", "2 \N{MULTIPLICATION SIGN} 3 ?".encode()),
        # Python's choice in the C locale: the bytes of a file's name stay as they are.
        ("utf-8", "surrogateescape", b"2 \xc3\x97 3 \xff"),
        ("ascii", "surrogateescape", b"2 ? 3 ?"),
        ("ascii", "backslashreplace", b"2 \\xd7 3 \\udcff"),
    ],
)
def test_every_encoding_takes_every_text(monkeypatch, encoding, errors, written):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding, errors)
    monkeypatch.setattr(sys, "stdout", stream)
    accept_all_text()
    name = os.fsdecode(b"\xff")
    sys.stdout.write(f"2 \N{MULTIPLICATION SIGN} 3 {name}")
    sys.stdout.flush()
    assert raw.getvalue() == written


def test_the_command_is_the_same_by_both_names():
    root = Path(__file__).parents[2]
    help_text = subprocess.run(
        [sys.executable, "-m", "megavis", "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert help_text.startswith("usage: megavis ")
