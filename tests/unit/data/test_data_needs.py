"""What training data need: against folders as they are read, and a made-up large one by hand."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import numpy as np
import pytest
from children import in_child
from shard_folder import write_folder

from megavis.config.errors import UserError
from megavis.config.section import DataConfig
from megavis.data.format.manifest import Manifest, ShardEntry
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.needs import data_needs, needs_lines
from megavis.parallel.limits import allowed_open_files
from megavis.planning.data_rates import DataRates, rate_lines

pytestmark = pytest.mark.once
GIB = 1 << 30


@pytest.fixture
def small(tmp_path):
    tokens = np.zeros((48, 16), np.uint16)
    return write_folder(
        tmp_path / "shards", tokens=tokens, labels=[0] * 48, samples_per_shard=4, class_names=["a"]
    )


def large():
    """A hundred million samples of 64² tokens in 10,000 shards of 51.2 MB."""
    shards = tuple(
        ShardEntry(
            name=f"shard-{number:06d}.tar",
            num_samples=10_000,
            num_bytes=51_200_000,
            sha256="0" * 64,
            index_sha256="0" * 64,
        )
        for number in range(10_000)
    )
    return Manifest.model_construct(shards=shards)


def config(**keys):
    return DataConfig(**{"train": "s3://bucket/train", "cache": "/cache", **keys})


def test_index_and_sizes_are_the_folders(small, tmp_path):
    needs = data_needs(config(), [small], 1_024)
    assert needs.index_bytes == (tmp_path / "shards" / "samples.index").stat().st_size
    tars = sum(file.stat().st_size for file in (tmp_path / "shards").glob("*.tar"))
    assert needs.bytes_a_sample * 48 == pytest.approx(tars)
    assert needs.cache_bytes() == tars + needs.index_bytes


@pytest.mark.parametrize("window", [2, 3, 4, 12, None])
def test_opens_are_those_of_an_epoch(small, tmp_path, window, monkeypatch):
    opened = []
    open_one = ShardDataset._open_shard
    monkeypatch.setattr(
        ShardDataset,
        "_open_shard",
        lambda self, shard: opened.append(shard) or open_one(self, shard),
    )
    needs = data_needs(config(window_shards=window), [small], 65_536)
    dataset = ShardDataset(tmp_path / "shards", window_shards=window)
    assert needs.at_once == needs.kept == dataset.most_open_shards or needs.kept == 12
    indices = dataset.order(0).dataset_index(np.arange(96))
    for place in range(0, 96, 4):
        dataset.read(indices[place : place + 4])
    # Two epochs; all at once, each shard is opened once altogether.
    expected = 12 if needs.folders[0].num_windows == 1 else 24
    assert len(opened) <= expected
    assert len(opened) >= expected - needs.at_once  # those that the border of epochs keeps
    assert needs.opens_a_sample * 96 == (0 if expected == 12 else 24)


def test_more_shards_than_may_stay_open_are_opened_again(small):
    """As measured for all samples of 10,000 shards: 976 of 1,000 with 256 open (docs/data.md)."""
    needs = data_needs(config(), [large()], 1_024)
    assert needs.kept == 256
    assert needs.opens_a_sample == pytest.approx(0.976, abs=0.002)
    windows = data_needs(config(window_shards=64), [large()], 1_024)
    assert windows.opens_a_sample * 1_000 == pytest.approx(0.1)


def test_a_hundred_million_samples():
    needs = data_needs(config(window_shards=128, cache_gib=20), [large()], 65_536)
    assert needs.index_bytes == 1_600_800_096
    assert (needs.at_once, needs.kept) == (254, 254)  # 79 windows of 127 shards at most
    assert needs.bytes_a_sample == needs.fetched_a_sample == 5_120
    assert needs.cache_bytes(2) == 2 * 127 * 51_200_000 + 1_600_800_096
    assert not list(needs.complaints())
    first, second = needs_lines(needs)
    assert first.startswith("100,000,000 samples in 10,000 shards, 5,120 bytes each; a process")
    assert "reads from 254 shards at once and keeps 254 of them open" in first
    assert "1,600.8 MB a node" in first
    assert second == (
        "data.cache on each node: one window 7.55 GiB, two 13.6 GiB, all 478 GiB;"
        " data.cache_gib 20 GiB"
    )


def test_rates_of_a_node_by_hand():
    """Sixteen ranks of two processes, eight processes a node, 4 · 2 samples a rank in 0.5 s."""
    needs = data_needs(config(window_shards=64, cache_gib=20), [large()], 1_024)
    layout = SimpleNamespace(micro_batch_size=4, accumulation_steps=2, data=16, name="tp2-pp1")
    plan = SimpleNamespace(layout=layout, time=SimpleNamespace(total=0.5))
    rates = DataRates.of(needs, plan, SimpleNamespace(devices_per_node=8))
    # Each process reads its rank's 16 samples a second; a node fetches all shards of the 256.
    assert rates == DataRates(read=8 * 16 * 5_120, opened=8 * 16 * 1e-4, fetched=256 * 5_120)
    *_, line = rate_lines(needs, rates, "tp2-pp1")
    assert line == (
        "a node of tp2-pp1 reads 0.7 MB/s and opens 0.0128 files a second, and fetches 1.3 MB/s,"
        " all shards once an epoch"
    )


def test_what_cannot_work_names_its_key():
    [[key, text]] = data_needs(
        config(window_shards=128, cache_gib=7), [large()], 65_536
    ).complaints()
    assert key == "data.cache_gib"
    assert text == (
        "7 GiB are too small: the shards that are read at once, with the index, take 7.55; set"
        " 13.6, so that the next ones can be fetched meanwhile, or fewer data.window_shards"
    )
    [[key, text]] = data_needs(config(cache_gib=400), [large()], 65_536).complaints()
    assert key == "data.cache_gib"
    assert "all shards are read at once, which take 478 with the index" in text
    [[key, text]] = data_needs(config(window_shards=600), [large()], 1_024).complaints()
    assert key == "data.window_shards"
    assert text == (
        "1,178 shards are read at once, and a process may have 1,024 files open here"
        " (`ulimit -Hn`): set it to 128 or less"
    )
    [[key, _]] = data_needs(config(), [large()], 1_024).complaints()
    assert key == "data.window_shards"
    # The advice works, for several folders too.
    sources = [{"path": f"s3://b/{name}", "weight": 1.0} for name in "ab"]
    both = config(train=sources, window_shards=600)
    [[_, text]] = data_needs(both, [large(), large()], 1_024).complaints()
    assert "set it to 64 or less" in text
    good = config(train=sources, window_shards=64)
    needs = data_needs(good, [large(), large()], 1_024)
    assert not list(needs.complaints())
    assert needs.kept == needs.at_once


def under_a_limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return allowed_open_files()


def test_the_limit_is_what_training_raises_it_to():
    assert in_child(under_a_limit, 256, 400) == 400


def test_local_folders_need_no_cache(small, tmp_path):
    needs = data_needs(config(train=str(tmp_path / "shards"), cache_gib=1e-9), [small], 1_024)
    assert not list(needs.complaints())
    assert needs.fetched_a_sample == 0
    assert len(list(needs_lines(needs))) == 1


def test_a_cache_without_a_folder_is_refused(small_config):
    from megavis.config.load import load_config

    with pytest.raises(UserError, match=r"data\.cache_gib: is the size of data\.cache"):
        load_config(small_config, ["data.cache_gib=1"])


def test_training_refuses_a_cache_that_is_too_small(small, tmp_path, small_config):
    from megavis.cli import main

    folder = tmp_path / "shards"
    words = [f"data.train=file://{folder}", f"data.cache={tmp_path}/cache", "data.window_shards=2"]
    words += [f"output={tmp_path}", f"data.cache_gib={1_000 / GIB}", "data.validation=null"]
    assert main(["train", str(small_config), *words]) == 2
