"""A source that vanishes during a job, as an unmounted disk does: the job fails, and goes on."""

from __future__ import annotations

import pytest
from image_files import tree
from image_sources import small_jpeg, web_members, write_folder, write_tar

from data_tools import image_shards, sources
from data_tools.__main__ import main
from data_tools.sources import list_images
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
