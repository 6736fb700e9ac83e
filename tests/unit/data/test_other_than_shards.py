"""A path that is no shard folder: what it is instead, and which command makes shards of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from image_sources import small_jpeg, tar_bytes, web_members, write_folder, write_tar

from data_tools.__main__ import main
from megavis.config.errors import UserError
from megavis.config.yaml_tree import expand_home
from megavis.data.format.manifest import Manifest

pytestmark = pytest.mark.once

CONTENTS = {
    "a tar": ({"x.tar": tar_bytes(web_members(range(1)))}, "x.tar"),
    "a tar with another name": ({"x.data": tar_bytes(web_members(range(1)))}, "x.data"),
    "a compressed tar": ({"x.tar.gz": b"\x1f\x8b"}, "x.tar.gz"),
    "tars": ({"web/0.tar": b"", "web/1.tar": b""}, "web"),
    "class folders": ({"set/cat/a.jpg": small_jpeg(0), "set/dog/b.jpg": small_jpeg(1)}, "set"),
    "images": ({"set/a.jpg": small_jpeg(0), "set/notes.txt": b""}, "set"),
    "splits": ({"set/train/cat/a.jpg": b"x", "set/val/cat/b.jpg": b"x"}, "set"),
    "an image": ({"a.jpg": small_jpeg(0)}, "a.jpg"),
    "a file": ({"x.npz": b"PK"}, "x.npz"),
    "nothing": ({"set/.hidden": b""}, "set"),
    "something else": ({"set/notes.txt": b""}, "set"),
    "a run folder": ({"run/config.yaml": b"", "run/checkpoints/latest": b""}, "run"),
    "shard folders": ({"s/train/manifest.json": b"{}", "s/val/manifest.json": b"{}"}, "s"),
    "unfinished shards": ({"s/shard-000000.tar": b"", "s/shard-000000.index.json": b""}, "s"),
    "a manifest": ({"s/manifest.json": b"{}"}, "s/manifest.json"),
    "a shard": ({"s/manifest.json": b"{}", "s/shard-000000.tar": b""}, "s/shard-000000.tar"),
    "a broken link": ({}, "link"),
}
JPEG = "`python -m data_tools jpeg {path} --out FOLDER`"
MESSAGES = {
    "a tar": "{path} is a tar, not a shard folder; " + JPEG,
    "a tar with another name": "{path} is a tar, not a shard folder; " + JPEG,
    "a compressed tar": "{path} is a compressed tar: unpack it, and give",
    "tars": "{path} holds 2 tars, which are not shards of megavis; " + JPEG,
    "class folders": "{path} is a folder of images, not of shards; " + JPEG,
    "images": "{path} is a folder of images, not of shards; " + JPEG,
    "splits": "{path} holds folders of images, train and val; `python -m data_tools jpeg {path}/tr",
    "an image": "{path} is an image; give a shard folder",
    "a file": "{path} is a file; give a shard folder",
    "nothing": "{path} is empty",
    "something else": "{path} holds neither shards nor images",
    "a run folder": "{path} is a run folder; give a shard folder",
    "shard folders": "{path} holds the shard folders train and val: give one of them",
    "unfinished shards": "manifest.json is missing: this is not a finished shard folder; run",
    "a manifest": "{path} is a file of a shard folder: give the folder, {path.parent}",
    "a shard": "{path} is a file of a shard folder: give the folder, {path.parent}",
    "a broken link": "{path} is a link to nowhere, which does not exist",
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_what_a_path_is(kind, tmp_path):
    files, name = CONTENTS[kind]
    write_folder(tmp_path, files)
    if kind == "a broken link":
        (tmp_path / name).symlink_to("nowhere")
    path = tmp_path / name
    with pytest.raises(UserError) as caught:
        Manifest.read(path)
    assert MESSAGES[kind].format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_that_is_named_makes_shards(tmp_path):
    root = write_folder(tmp_path / "set", {"cat/a.jpg": small_jpeg(0), "dog/b.jpg": small_jpeg(1)})
    with pytest.raises(UserError) as caught:
        Manifest.read(root)
    words = str(caught.value).split("`")[1].replace("FOLDER", str(tmp_path / "out")).split()
    assert main(words[3:]) == 0
    assert Manifest.read(tmp_path / "out").num_samples == 2


def test_a_folder_that_cannot_be_listed_in_another(tmp_path, monkeypatch):
    """The sentence is about a wrong path: it looks no deeper than it may."""
    write_folder(tmp_path, {"a/b/c.txt": b""})
    whole = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", path)
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match="holds neither shards nor images"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$SOMEWHERE/x", r"\$SOMEWHERE is not replaced in a path: write {tmp}/x"),
        ("${SOMEWHERE}/y", r"\${SOMEWHERE} is not replaced in a path: write the path itself"),
        ("$UNKNOWN_TO_ALL/x", r"\$UNKNOWN_TO_ALL is not replaced in a path: write the path itself"),
        ("~bob/x", "~bob is not replaced in a path: write the path itself"),
        ("/nowhere/at/all", "/nowhere/at/all does not exist"),
    ],
)
def test_paths_that_are_not_there(path, message, tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    monkeypatch.setenv("SOMEWHERE", str(tmp_path))
    with pytest.raises(UserError, match=message.replace("{tmp}", str(tmp_path))):
        Manifest.read(path)


def test_a_relative_path_of_another_folder(tmp_path):
    """A child process, since the working folder is that of all tests."""
    write_folder(tmp_path, {"project/shards/train/manifest.json": b"{}", "project/runs/a": b""})
    words = [sys.executable, "-m", "data_tools", "verify"]
    for path, message in (
        ("shards/train", f"does not exist in {tmp_path}/project/runs, where relative paths start; "
         f"there is {tmp_path}/project/shards/train"),
        ("shards/test", f"shards/test does not exist in {tmp_path}/project/runs, where relative"),
    ):  # fmt: skip
        done = subprocess.run(
            [*words, path],
            cwd=tmp_path / "project" / "runs",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("home", [None, ""])
def test_no_home_folder(home, monkeypatch):
    monkeypatch.setenv("HOME", home) if home is not None else monkeypatch.delenv("HOME")
    if home is None:  # and the user has no entry either, as in a container with any number
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(UserError, match=r"~/x: .*HOME.*write the path itself"):
        expand_home({"data": {"train": ["~/x"]}})


def test_tars_of_images_beside_other_shards(tmp_path):
    write_tar(tmp_path / "web" / "shard-000000.tar", web_members(range(1)))
    with pytest.raises(UserError, match="holds 1 tar, which is not a shard of megavis"):
        Manifest.read(tmp_path / "web")
