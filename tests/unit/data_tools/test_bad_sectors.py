"""One file that the disk cannot read, now or later, is counted; the others are written.

Reading `/proc/self/mem` at its start fails as a bad sector does: it has a size, and may be opened.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
from image_sources import opened, small_jpeg, web_members, write_folder, write_tar
from labelled_files import write_cifar10, write_stl10
from scene_shards import write_scenes
from vtab_files import write_norb

from data_tools.__main__ import main
from data_tools.imagenet import flat_files
from data_tools.selection import ImageSelection
from data_tools.sources import list_images
from data_tools.tars import TarPart, is_tar
from megavis.data.format.manifest import Manifest

pytestmark = pytest.mark.once

BAD = "/proc/self/mem"


def write_bad_image(root):
    write_folder(root, {f"cat/{number}.jpg": small_jpeg(number) for number in range(4)})
    (root / "cat" / "bad.jpg").symlink_to(BAD)


def write_bad_tar(root):
    for number in range(2):
        write_tar(root / f"{number}.tar", web_members(range(2 * number, 2 * number + 2)))
    (root / "bad.tar").symlink_to(BAD)


@pytest.mark.parametrize("write", [write_bad_image, write_bad_tar])
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_file_with_a_bad_sector_is_counted(write, workers, tmp_path):
    root, out = tmp_path / "web", tmp_path / "out"
    write(root)
    words = ["jpeg", str(root), "--samples-per-shard", "2", "--workers", workers]
    assert main([*words, "--out", str(out)]) == 0
    assert Manifest.read(out).num_samples == 4
    assert Manifest.read(out).skipped == {"unreadable file": 1}


@pytest.mark.parametrize("bad", ["images", "panoptic"])
def test_a_pair_with_a_bad_sector_is_counted(bad, tmp_path):
    scenes, out = write_scenes(tmp_path), tmp_path / "out"
    path = sorted((scenes / bad / "train").iterdir())[0]
    path.unlink()
    path.symlink_to(BAD)
    words = [str(scenes / "images/train"), str(scenes / "panoptic/train")]
    listed = str(scenes / "panoptic_train.json")
    assert main(["maps", "panoptic", *words, listed, "--out", str(out)]) == 0
    assert Manifest.read(out).skipped == {"unreadable file": 1}


class BadSector(io.FileIO):
    """A file of which one sector cannot be read."""

    place = 0

    def readinto(self, buffer):
        left = self.place - self.tell()
        if -512 < left <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(memoryview(buffer)[: left if left > 0 else None])


@pytest.mark.parametrize(
    ("bad", "names", "refused"),
    [("image", ["0", "2"], "web.tar/000000001.jpg"), ("header", ["0"], "web.tar")],
)
def test_images_around_a_bad_sector_of_a_tar_are_kept(bad, names, refused, tmp_path, monkeypatch):
    path = tmp_path / "web.tar"
    members = [(f"00000000{number}.jpg", small_jpeg(number) + bytes(20_000)) for number in range(3)]
    write_tar(path, members)
    second = path.read_bytes().index(b"000000001.jpg")
    monkeypatch.setattr(BadSector, "place", second + (2048 if bad == "image" else 0))
    monkeypatch.setattr("pathlib.Path.open", lambda self, _: io.BufferedReader(BadSector(self)))
    part = TarPart(path, path.stat().st_size, 0, 0, 0, ImageSelection())
    found = []
    read = [each.name for each in part.pictures(lambda *each: found.append(each))]
    assert read == [f"web.tar/00000000{number}.jpg" for number in names]
    assert found == [(refused, "unreadable file")]


def fail_with(number, monkeypatch, *, named=True):
    """Let reading `bad.jpg` fail; an error of opening is named, one of reading is not."""
    read = Path.read_bytes

    def read_bytes(self):
        if self.name == "bad.jpg":
            raise OSError(number, os.strerror(number), *([str(self)] if named else []))
        return read(self)

    monkeypatch.setattr("pathlib.Path.read_bytes", read_bytes)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_permission_that_access_does_not_predict(number, tmp_path, monkeypatch):
    root, out = tmp_path / "web", tmp_path / "out"
    write_folder(root, {"good.jpg": small_jpeg(0), "bad.jpg": small_jpeg(1)})
    fail_with(number, monkeypatch)
    assert main(["jpeg", str(root), "--out", str(out)]) == 0
    assert Manifest.read(out).skipped == {"unreadable file": 1}


@pytest.mark.parametrize("lost", ["root", "file"])
def test_a_disk_that_is_lost_fails_the_job(lost, tmp_path, monkeypatch):
    root = write_folder(tmp_path / "web", {"bad.jpg": small_jpeg(1)})
    fail_with(errno.EIO, monkeypatch, named=False)
    [part] = list_images(root).parts(files_per_part=1, seed=0)
    if lost == "root":
        root.rename(tmp_path / "away")
    else:
        (root / "bad.jpg").unlink()
    with pytest.raises(OSError, match=r"/bad\.jpg'$") as failure:
        list(part.pictures(lambda *_: None))
    assert failure.value.errno == errno.EIO


def test_other_errors_fail_the_job(tmp_path, monkeypatch, capsys):
    root, out = tmp_path / "web", tmp_path / "out"
    write_folder(root, {"good.jpg": small_jpeg(0), "bad.jpg": small_jpeg(1)})
    fail_with(errno.ESTALE, monkeypatch, named=False)
    assert main(["jpeg", str(root), "--out", str(out)]) == 1
    assert f"not finished: Stale file handle: {root}/bad.jpg; " in capsys.readouterr().out
    assert not list(out.glob("*index.json"))


@pytest.mark.parametrize("read", [is_tar, flat_files])
def test_errors_of_listing_name_the_tar(read):
    with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        read(Path(BAD))


RAW = {
    "cifar-10": (write_cifar10, "test_batch.bin"),
    "stl-10": (write_stl10, "test_X.bin"),
    "smallnorb-azimuth": (write_norb, "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat"),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_pixels_that_are_truncated_after_they_were_listed(name, tmp_path):
    write, path = RAW[name]
    write(tmp_path)
    source = opened(tmp_path, "--layout", name, "--split", "test")
    [part] = source.parts(files_per_part=10_000, seed=0)
    os.truncate(tmp_path / path, (tmp_path / path).stat().st_size // 2)
    refused = []
    kept = list(part.pictures(lambda *why: refused.append(why)))
    assert {reason for _, reason in refused} == {"truncated"}
    assert len(kept) + len(refused) == part.num_files
