"""`--measure`: shards and measurements of one reading are those of two."""

from __future__ import annotations

import pytest
from image_files import encoded
from image_sources import write_folder
from web_images import DROPPED, filter_words, jpeg, photograph, write_web

from data_tools import tars
from data_tools.__main__ import main
from megavis.data.format.manifest import Manifest
from megavis.data.format.shards import ShardReader

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    return write_web(tmp_path_factory.mktemp("web"))


def jpeg_words(source, out, *options):
    return ["jpeg", str(source), "--out", str(out), "--size", "32", *map(str, options)]


def samples(folder):
    """Key, payload, label and source of each sample."""
    return [
        (key, reader.read(number).tobytes(), index.labels[number], index.sources[number])
        for shard in Manifest.read(folder).shards
        for reader in [ShardReader(folder / shard.name)]
        for index in [reader.index]
        for number, key in enumerate(index.keys)
    ]


def files_in(folder):
    """Files by path, without reports, which have measurements, and locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "report.json" and path.name[0] != "."
    }


def test_one_reading_gives_what_two_give(web, tmp_path, monkeypatch):
    two, one = tmp_path / "two", tmp_path / "one"
    assert main(filter_words(web, two / "selection")) == 0
    assert main(jpeg_words(web / "tars", two / "kept", "--selection", two / "selection")) == 0
    assert main(jpeg_words(web / "tars", two / "all")) == 0
    opened = []
    read = tars.TarPart._opened
    monkeypatch.setattr(tars.TarPart, "_opened", lambda part: opened.append(part) or read(part))
    for part in ("2/2", "1/2"):
        words = jpeg_words(web / "tars", one / "all", "--measure", one / "selection")
        assert main([*words, "--slice", part]) == 0
    assert len(opened) == 2, "as many as tars"
    monkeypatch.setattr(tars.TarPart, "_opened", lambda _: pytest.fail("a tar is read again"))
    assert main(filter_words(web, one / "selection")) == 0
    words = ["reshard", str(one / "all"), "--selection", str(one / "selection")]
    assert main([*words, "--out", str(one / "kept")]) == 0
    for name in ("selection", "all"):
        mine, other = (files_in(each / name) for each in (one, two))
        assert mine == other
    assert (one / "selection" / "report.json").read_bytes() == (
        two / "selection" / "report.json"
    ).read_bytes()
    assert samples(one / "kept") == samples(two / "kept")
    skipped = Manifest.read(one / "kept").skipped
    assert sum(skipped.values()) == len(DROPPED)
    assert skipped["truncated"] == 1
    assert skipped["filtered: near-duplicate of another picture"] == 2


def test_an_image_may_be_refused_by_one_of_both(tmp_path):
    """Too narrow for a shard, it is still measured, as `filter` does alone."""
    wide = photograph(3).resize((900, 9))
    source = write_folder(
        tmp_path / "web", {"a.png": encoded(wide, "PNG"), "b.jpg": jpeg(photograph(2))}
    )
    words = jpeg_words(source, tmp_path / "all", "--measure", tmp_path / "selection")
    assert main(words) == 0
    assert main(["filter", str(source), "--out", str(tmp_path / "alone")]) == 0
    names = (tmp_path / "selection" / "measurements", tmp_path / "alone" / "measurements")
    mine, alone = (files_in(each) for each in names)
    assert mine == alone
    assert Manifest.read(tmp_path / "all").skipped == {"aspect ratio above 64": 1}


def test_what_does_not_fit_is_said(web, tmp_path, capsys):
    words = jpeg_words(web / "tars", tmp_path / "all", "--measure", tmp_path / "selection")
    assert main([*words, "--split", "train"]) == 2
    assert "--measure measures all images" in capsys.readouterr().err
    # Shards of the same images that were written without it, in other parts.
    files = {f"{number}.jpg": jpeg(photograph(number)) for number in range(4)}
    source, selection = write_folder(tmp_path / "few", files), tmp_path / "chosen"
    assert main(["filter", str(source), "--out", str(selection)]) == 0
    assert main(jpeg_words(source, tmp_path / "shards", "--samples-per-shard", "2")) == 0
    words = ["reshard", str(tmp_path / "shards"), "--selection", str(selection)]
    assert main([*words, "--out", str(tmp_path / "no")]) == 2
    error = capsys.readouterr().err
    assert "has no measurement of" in error
    assert error.count("\n") == 1
    other = write_folder(tmp_path / "other", {"a.jpg": jpeg(photograph(0))})
    assert main(jpeg_words(other, tmp_path / "others")) == 0
    words = ["reshard", str(tmp_path / "others"), "--selection", str(selection)]
    assert main([*words, "--out", str(tmp_path / "no")]) == 2
    assert "was made from other images" in capsys.readouterr().err
