"""Too little memory for an image says nothing about the image."""

from __future__ import annotations

import contextlib
import io
import re
import resource
from pathlib import Path

import numpy as np
import pytest
from children import in_child
from image_files import encoded
from image_sources import small_jpeg, write_folder
from PIL import Image, ImageFile

from data_tools.__main__ import main
from data_tools.decode import decode_image
from megavis.data.codecs.jpeg import decode_png, decode_rgb
from megavis.data.format.manifest import Manifest

pytestmark = pytest.mark.once
SIDE = 8_000


def run_with_little_memory(words, before):
    """Run a command whose memory may grow by less than the large image needs.

    The command `before` imports what it needs.
    """
    assert main(before) == 0
    pages = int(re.findall(r"\d+", Path("/proc/self/statm").read_text())[0])
    limit = pages * resource.getpagesize() + 3 * SIDE**2
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(words)
    return code, printed.getvalue()


def test_a_job_fails_and_a_rerun_reads_the_image(tmp_path):
    large = encoded(Image.new("RGBA", (SIDE, SIDE), (1, 2, 3, 4)), "PNG")
    root = write_folder(tmp_path / "web", {"a/large.png": large, "a/small.jpg": small_jpeg(0)})
    small, out = write_folder(tmp_path / "small", {"a.jpg": small_jpeg(0)}), tmp_path / "out"
    words = ["jpeg", str(root), "--out", str(out), "--size", "16"]
    before = ["jpeg", str(small), "--out", str(tmp_path / "before"), "--size", "16"]
    code, printed = in_child(run_with_little_memory, words, before)
    assert code == 1
    assert "not finished: Cannot allocate memory: a/large.png; " in printed
    assert not list(out.glob("*index.json"))
    assert main(words) == 0
    assert Manifest.read(out).num_samples == 2


@pytest.mark.parametrize("read", [decode_image, decode_png, decode_rgb])
def test_decoders_do_not_call_it_damage(read, monkeypatch):
    def full(image):
        raise MemoryError

    content = encoded(Image.fromarray(np.zeros((8, 8, 3), np.uint8)), "PNG")
    monkeypatch.setattr(ImageFile.ImageFile, "load", full)
    with pytest.raises(MemoryError):
        read(content)


def test_other_commands_say_it_in_one_sentence(tmp_path, monkeypatch, capsys):
    def full(image):
        raise MemoryError

    root = write_folder(tmp_path / "web", {"a.png": encoded(Image.new("RGB", (8, 8)), "PNG")})
    monkeypatch.setattr(ImageFile.ImageFile, "load", full)
    assert main(["palette", "fit", str(root), "--out", str(tmp_path / "palette.npy")]) == 1
    assert capsys.readouterr().err.startswith("error: not enough memory: ")
