"""Whether results can be written to a place. /proc refuses the root user too."""

import re

import pytest

from megavis.config.errors import UserError
from megavis.config.places import check_file, check_place, nearest_folder, refusal


def test_a_place_is_tried_and_left_as_it_was(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    before = tmp_path.stat().st_mtime_ns
    check_file(tmp_path / "old.json")
    check_file(tmp_path / "new" / "deep" / "result.json")
    check_place(tmp_path / "run")
    assert refusal(tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert (tmp_path / "old.json").read_text() == "{}"
    assert tmp_path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("/proc/new/result", "/proc/new/result: nothing can be written there (No such file"),
        (
            "{}/old.json/result",
            "{0}/old.json/result would lie in {0}/old.json, which is not a fold",
        ),
        ("{}/" + "o" * 300, ": nothing can be written there (File name too long)"),
        ("{}/new/" + "o" * 300, ": nothing can be written there (File name too long)"),
        ("{}", "{} is a folder; name a file"),
    ],
)
def test_places_where_no_file_can_be_written(tmp_path, place, message):
    (tmp_path / "old.json").write_text("{}")
    with pytest.raises(UserError, match=re.escape(message.format(tmp_path))):
        check_file(type(tmp_path)(place.format(tmp_path)))


def test_a_path_below_a_file_is_in_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert nearest_folder(tmp_path / "new" / "run") == tmp_path
    with pytest.raises(UserError, match="which is not a folder"):
        nearest_folder(tmp_path / "file" / "run")
