"""`data_tools index`: a damaged, stale, earlier or missing index is named, and built again."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from shard_folder import write_folder

from data_tools.__main__ import main
from megavis.config.errors import UserError
from megavis.data.format.sample_index import SAMPLE_INDEX_NAME, listed_records
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once
HEADER, SUMMARY, RECORD = 96, 80, 16
TOKENS = np.random.default_rng(0).integers(0, 512, (37, 16)).astype(np.uint16)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "shards"
    labels = [number % 4 - 1 for number in range(37)]
    write_folder(path, tokens=TOKENS, labels=labels, class_names=["a", "b", "c"])
    return path


def read_all(path):
    return ShardDataset(path).read(np.arange(37))


def earlier_format(content):
    """The index of 37 samples as it was written before: columns of all samples, with keys."""
    columns = [np.arange(37, dtype="<i8")] * 3 + [np.zeros(37, "<i4")]
    return b"".join(column.tobytes() for column in columns) + b"0" * 9 * 37


def flipped(place):
    return lambda content: content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: None, "is missing"),
        (lambda content: b"", "is cut short"),
        (lambda content: content[:95], "is cut short"),
        (lambda content: content[: HEADER + 3 * SUMMARY], "is damaged"),
        (lambda content: content[: HEADER + 4 * SUMMARY], "has 416 bytes, and 1008 are right"),
        (lambda content: content[:-1], "has 1007 bytes, and 1008 are right"),
        (lambda content: content + b" ", "has 1009 bytes, and 1008 are right"),
        (earlier_format, "is damaged or of an earlier format"),
        (flipped(3), "is damaged or of an earlier format"),
        (flipped(8), "is damaged or of an earlier format"),  # the version
        (flipped(16), "was built from other shards than the manifest's"),
        (flipped(24), "has other numbers of samples than the manifest"),
        (flipped(40), "was built from other shards than the manifest's"),
        (flipped(80), "is damaged"),
        (flipped(HEADER + SUMMARY), "is damaged"),
        (flipped(HEADER + 4 * SUMMARY), "is damaged where it lists shard-000000.tar"),
        (flipped(HEADER + 4 * SUMMARY + 30 * RECORD), "is damaged where it lists shard-000003.tar"),
        (flipped(HEADER + 4 * SUMMARY + 37 * RECORD - 1), "is damaged where it lists shard-000003"),
    ],
)
def test_damage_is_named_and_mended(folder, capsys, change, words):
    path, samples = folder / SAMPLE_INDEX_NAME, read_all(folder)
    whole = path.read_bytes()
    manifest = (folder / "manifest.json").read_bytes()
    changed = change(whole)
    path.unlink() if changed is None else path.write_bytes(changed)
    with pytest.raises(UserError) as error:
        read_all(folder)
    command = f"run `python -m data_tools index {folder}`, which builds it again"
    assert words in str(error.value)
    assert str(error.value).endswith(command)
    assert main(["verify", str(folder)]) == 1
    assert command in capsys.readouterr().out

    assert main(["index", str(folder)]) == 0
    assert "37 samples in 4 shards, 27.2 bytes a sample" in capsys.readouterr().out
    assert path.read_bytes() == whole, "the bytes depend on the shards alone"
    assert (folder / "manifest.json").read_bytes() == manifest
    for one, other in zip(read_all(folder), samples, strict=True):
        assert (one == other).all()


def test_folder_of_an_earlier_version(folder):
    """Before, the manifest had no hash of the index, and there was none."""
    path = folder / "manifest.json"
    whole, manifest = path.read_bytes(), json.loads(path.read_text())
    del manifest["index_sha256"]
    path.write_text(json.dumps(manifest))
    (folder / SAMPLE_INDEX_NAME).unlink()
    with pytest.raises(
        UserError, match=r"samples\.index is missing: run `python -m data_tools ind"
    ):
        ShardDataset(folder)
    assert main(["index", str(folder), "--workers", "2"]) == 0
    assert path.read_bytes() == whole
    assert (read_all(folder)[0] == TOKENS).all()


def test_index_of_other_shards(folder, tmp_path):
    """A folder whose shards were written again, with the index that it had."""
    path = folder / SAMPLE_INDEX_NAME
    stale = path.read_bytes()
    write_folder(folder, tokens=TOKENS[::-1], labels=[0] * 37, class_names=["a"])
    path.write_bytes(stale)
    with pytest.raises(UserError, match="built from other shards than the manifest's: run `python"):
        ShardDataset(folder)


def test_killed_while_it_is_written(folder):
    path = folder / SAMPLE_INDEX_NAME
    whole = path.read_bytes()
    path.unlink()
    killed = (
        "import os, sys, data_tools.__main__ as command\n"
        "from pathlib import Path\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "command.main(['index', sys.argv[1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(list(folder.glob(f".{SAMPLE_INDEX_NAME}.partial-*"))) == 1
    assert main(["index", str(folder)]) == 0
    assert path.read_bytes() == whole
    assert not list(folder.glob(".samples*"))


KILLED_AT_THE_THIRD = """
import os, sys, data_tools.__main__ as command, megavis.data.format.sample_index as module
list_one = module.listed_records
module.listed_records = lambda folder, shard: (
    os.kill(os.getpid(), 9) if shard.name.endswith("2.tar") else list_one(folder, shard)
)
command.main(["index", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        (lambda content: content, [2, 3]),
        (lambda content: content[:-1], [1, 2, 3]),  # of a machine that lost power
        (lambda content: content[:40] + b"?" + content[41:], [0, 1, 2, 3]),
        (lambda content: b"other shards" + content[12:], [0, 1, 2, 3]),
        (lambda content: b"", [0, 1, 2, 3]),
    ],
)
def test_a_rerun_goes_on_after_the_last_shard_listed(folder, monkeypatch, change, listed):
    path = folder / SAMPLE_INDEX_NAME
    whole = path.read_bytes()
    path.unlink()
    words = [sys.executable, "-c", KILLED_AT_THE_THIRD, str(folder)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    kept = folder / f".{SAMPLE_INDEX_NAME}.listed"
    kept.write_bytes(change(kept.read_bytes()))
    seen = []

    def list_one(directory, shard):
        seen.append(int(shard.name[6:12]))
        return listed_records(directory, shard)

    monkeypatch.setattr("megavis.data.format.sample_index.listed_records", list_one)
    assert main(["index", str(folder)]) == 0
    assert seen == listed
    assert path.read_bytes() == whole
    assert not list(folder.glob(".samples*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "shard-000001.index.json is missing: write the shards again"),
        (lambda path: path.write_text("{}"), "does not have the SHA-256 of the manifest"),
    ],
)
def test_json_index_is_needed(folder, capsys, change, words):
    path = folder / SAMPLE_INDEX_NAME
    whole = path.read_bytes()
    change(folder / "shard-000001.index.json")
    assert main(["index", str(folder)]) == 2
    assert words in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_what_is_no_shard_folder(tmp_path, capsys):
    assert main(["index", str(tmp_path)]) == 2
    assert "is empty" in capsys.readouterr().err
    assert main(["index", str(tmp_path), "--workers", "-1"]) == 2
    assert "--workers: '-1' is not a whole number of 0 or more" in capsys.readouterr().err
