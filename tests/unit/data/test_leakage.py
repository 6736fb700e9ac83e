"""Evaluation images that were trained on are found by shard, by source and by sample."""

import shutil

import numpy as np
import pytest

from data_tools.__main__ import main as data_tools
from megavis.config.errors import UserError
from megavis.data.loading import leakage
from megavis.data.loading.leakage import check_no_overlap, find_shards

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def folders(shard_folders):
    return {name: find_shards(str(shard_folders / name)) for name in ("train", "validation")}


def test_disjoint_sets(folders):
    assert check_no_overlap(folders["validation"], [folders["train"], folders["train"]]) == 0


def test_renamed_shard_is_found(folders, tmp_path):
    """The training set includes the renamed validation shard."""
    train, validation = folders["train"], folders["validation"]
    [shard] = validation.manifest.shards
    renamed = shard.model_copy(update={"name": "shard-000007.tar"})
    manifest = train.manifest.model_copy(update={"shards": (*train.manifest.shards, renamed)})
    shutil.copytree(train.directory, tmp_path / "mixed")
    manifest.write(tmp_path / "mixed")

    with pytest.raises(UserError) as refused:
        check_no_overlap(validation, [train, find_shards(str(tmp_path / "mixed"))])
    assert str(refused.value) == (
        f"{validation.directory} cannot evaluate what was trained on {tmp_path / 'mixed'}:"
        " its shard-000000.tar has the SHA-256 of the other's shard-000007.tar"
    )


def test_same_source_files_are_found(folders, shard_folders, tmp_path):
    source = str(shard_folders / "images" / "validation")
    assert data_tools(["jpeg", source, "--out", str(tmp_path / "jpeg")]) == 0
    jpeg = find_shards(str(tmp_path / "jpeg"))
    with pytest.raises(UserError, match="both were made from the same 36 files"):
        check_no_overlap(jpeg, [folders["validation"]])
    assert check_no_overlap(jpeg, [folders["train"]]) is None


def test_samples_are_found_in_other_shards(folders, tmp_path, monkeypatch):
    validation = folders["validation"]
    options = ["--samples-per-shard", "10", "--out", str(tmp_path / "small")]
    assert data_tools(["reshard", str(validation.directory), *options]) == 0
    small = find_shards(str(tmp_path / "small"))
    assert len(small.manifest.shards) == 4
    with pytest.raises(UserError, match="36 of its 36 samples are in both"):
        check_no_overlap(validation, [small])
    monkeypatch.setattr(leakage, "MAX_BYTES_TO_COMPARE", 1000)
    assert check_no_overlap(validation, [small]) is None


def test_equal_samples_are_counted(folders, monkeypatch):
    # Duplicates count once.
    others = [bytes(row) for row in np.eye(33)]
    digests = {"train": [b"a", b"b", b"b"], "validation": [b"b", b"b", b"b", *others]}
    by_folder = {folders[name].directory: hashes for name, hashes in digests.items()}
    monkeypatch.setattr(leakage, "_digests", lambda folder: by_folder[folder.directory])
    with pytest.raises(UserError, match="1 of its 36 samples"):
        check_no_overlap(folders["validation"], [folders["train"]])
    monkeypatch.setattr(leakage, "TOLERATED_FRACTION", 0.03)
    assert check_no_overlap(folders["validation"], [folders["train"]]) == 1
