"""An empty path, as from an unset variable, is not the current folder, and a URL is no path."""

from pathlib import Path

import pytest

import data_tools.__main__
import megavis.cli


@pytest.mark.parametrize(
    "words",
    [
        ["jpeg", "images", "--out", ""],
        ["jpeg", "", "--out", "out"],
        ["speech", "words", "--out", ""],
        ["palette", "fit", "images", "--out", ""],
        ["pairs", "images", "", "--out", "out", "--size", "8"],
        ["filter", "", "--out", "out"],
        ["letters", ""],
    ],
)
def test_data_tools_refuse_it(words, capsys):
    before = sorted(Path.cwd().iterdir())
    assert data_tools.__main__.main(words) == 2
    error = capsys.readouterr().err
    assert "the path is empty, as from an unset variable" in error
    assert error.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before


def test_megavis_refuses_it(capsys):
    assert megavis.cli.main(["sample", "", "--out", "sheet.png"]) == 2
    assert "the path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "s3://bucket/shards"],
        ["reshard", "https://host/shards", "--out", "out"],
        ["pairs", "images", "gs://bucket/depth", "--out", "out", "--size", "8"],
        ["filter", "images", "--out", "out", "--evaluation", "s3://bucket/val"],
        ["jpeg", "images", "--out", "out", "--selection", "s3://bucket/selection"],
    ],
)
def test_a_url_is_not_taken_for_a_path(words, capsys):
    assert data_tools.__main__.main(words) == 2
    (url,) = (word for word in words if "://" in word)
    assert f"{url} is a URL: give a local path" in capsys.readouterr().err
