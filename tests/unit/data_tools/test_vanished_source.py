"""A source that vanishes during a job, as an unmounted disk does: the job fails, and goes on."""

from __future__ import annotations

import errno
import os

import pytest
from image_files import tree
from image_sources import small_jpeg, web_members, write_folder, write_tar
from scene_shards import write_scenes

from data_tools import image_shards, sources
from data_tools.__main__ import main
from data_tools.sources import list_images, listed_size_and_fault, size_and_fault
from megavis.data.format.manifest import Manifest

pytestmark = pytest.mark.once


def folder_of_images(root):
    return write_folder(root, {f"cat/{number}.jpg": small_jpeg(number) for number in range(4)})


def folder_of_tars(root):
    for number in range(2):
        write_tar(root / f"{number}.tar", web_members(range(2 * number, 2 * number + 2)))
    return root


@pytest.mark.parametrize("write", [folder_of_images, folder_of_tars])
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_source_that_vanishes_is_not_damage(write, workers, tmp_path, monkeypatch, capsys):
    root, away, out = write(tmp_path / "web"), tmp_path / "away", tmp_path / "out"
    words = ["jpeg", str(root), "--samples-per-shard", "2", "--workers", workers, "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    really = image_shards.open_source

    with monkeypatch.context() as patch:

        def opened_and_unmounted(arguments):
            source = really(arguments)
            parts = source.parts(files_per_part=2, seed=0)
            patch.setattr(type(source), "parts", lambda self, **_: parts)
            root.rename(away)
            return source

        patch.setattr(image_shards, "open_source", opened_and_unmounted)
        assert main([*words, str(out)]) == 1
    said = capsys.readouterr().out
    assert "not finished: No such file or directory: " in said
    assert "run the same command again" in said
    assert not list(out.glob("*index.json"))
    assert not (out / "manifest.json").exists()
    away.rename(root)
    assert main([*words, str(out)]) == 0
    assert Manifest.read(out).num_samples == 4
    assert Manifest.read(out).skipped == {}
    assert tree(out) == tree(tmp_path / "whole")


def test_tars_that_vanish_before_they_are_divided(tmp_path, monkeypatch, capsys):
    root, away, out = folder_of_tars(tmp_path / "web"), tmp_path / "away", tmp_path / "out"
    words = ["jpeg", str(root), "--samples-per-shard", "2", "--out", str(out)]
    really = image_shards.open_source

    with monkeypatch.context() as patch:

        def opened_and_unmounted(arguments):
            source = really(arguments)
            root.rename(away)
            return source

        patch.setattr(image_shards, "open_source", opened_and_unmounted)
        assert main(words) == 1
    assert capsys.readouterr().err == f"error: No such file or directory: {root}/0.tar\n"
    assert not list(out.glob("*index.json"))
    away.rename(root)
    assert main(words) == 0
    assert Manifest.read(out).skipped == {}


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ENOENT])
def test_a_disk_that_fails_is_no_fault_of_a_file(number, tmp_path, monkeypatch):
    [path] = write_folder(tmp_path / "web", {"0.jpg": small_jpeg(0)}).iterdir()
    assert size_and_fault(path) == (len(small_jpeg(0)), "")

    def fail(*_, **__):
        raise OSError(number, os.strerror(number), str(path))

    for where in ("stat", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda *_: False)
            patch.setattr(f"pathlib.Path.{where}", fail)
            patch.setattr("pathlib.Path.is_symlink", lambda _: False)
            with pytest.raises(OSError, match=os.strerror(number)):
                size_and_fault(path)


def test_a_file_without_permission_is_refused(tmp_path, monkeypatch):
    [path] = write_folder(tmp_path / "web", {"0.jpg": small_jpeg(0)}).iterdir()

    def fail(*_, **__):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "access", lambda *_: False)
    assert size_and_fault(path) == (len(small_jpeg(0)), "")  # it can be opened all the same
    monkeypatch.setattr("pathlib.Path.open", fail)
    assert size_and_fault(path) == (len(small_jpeg(0)), "unreadable file")


def test_files_that_a_list_names(tmp_path):
    root = write_folder(tmp_path / "images", {"cat/0.jpg": small_jpeg(0)})
    (root / "lost").symlink_to(tmp_path / "unmounted")
    (root / "empty").mkdir()
    assert listed_size_and_fault(root, "cat/0.jpg") == (len(small_jpeg(0)), "")
    for never in ("cat/1.jpg", "1.jpg", "dog/1.jpg", "cat/0.jpg/1.jpg", f"{'o' * 300}.jpg"):
        assert listed_size_and_fault(root, never) == (-1, "unreadable file")
    assert listed_size_and_fault(root, "cat") == (-1, "not a regular file")
    for folder, name in (
        (root, "lost/0.jpg"),
        (root, "empty/0.jpg"),
        (root / "empty", "0.jpg"),
        (tmp_path / "unmounted", "0.jpg"),
    ):
        with pytest.raises(FileNotFoundError):
            listed_size_and_fault(folder, name)


@pytest.mark.parametrize("lost", ["images", "maps"])
def test_a_disk_of_listed_images_that_is_not_mounted(lost, tmp_path, capsys):
    scenes = write_scenes(tmp_path)
    folder = scenes / {"images": "images", "maps": "panoptic"}[lost] / "train"
    away, out = tmp_path / "away", tmp_path / "out"
    folder.rename(away)
    folder.mkdir()
    words = [str(scenes / "images/train"), str(scenes / "panoptic/train")]
    command = ["maps", "panoptic", *words, str(scenes / "panoptic_train.json"), "--out", str(out)]
    assert main(command) == 1
    assert f"error: No such file or directory: {folder}/" in capsys.readouterr().err
    folder.rmdir()
    away.rename(folder)
    assert main(command) == 0
    assert Manifest.read(out).skipped == {}


def test_a_file_that_vanishes_while_its_folder_is_listed(tmp_path, monkeypatch):
    root = folder_of_images(tmp_path / "web")
    monkeypatch.setattr(sources, "walk_files", lambda _: iter(["cat/0.jpg", "cat/gone.jpg"]))
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        list_images(root)


def test_links_that_were_broken_before_are_rejected(tmp_path):
    root = folder_of_images(tmp_path / "web")
    (root / "cat" / "loop.jpg").symlink_to(root / "cat" / "loop.jpg")
    (root / "cat" / "broken.jpg").symlink_to(tmp_path / "nowhere")
    refused = {file.name: file.refused for file in list_images(root).files if file.refused}
    assert refused == dict.fromkeys(("cat/broken.jpg", "cat/loop.jpg"), "unreadable file")
