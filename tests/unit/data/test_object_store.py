"""Shards on a real S3 server, behind a proxy that fails: the same samples, each read once."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import fsspec.config
import numpy as np
import pytest
import s3fs
import store_reader
from loading import inputs_by_position
from object_store import BUSY, DENIED, KEYS, open_server, open_store
from shard_folder import write_folder

from megavis.config.errors import UserError
from megavis.data.loading import stores
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.order import WindowedOrder
from megavis.training.metrics import read_metrics

pytestmark = pytest.mark.once
SHARDS, SAMPLES = 8, 6
STEPS = 8  # of 12 samples: two epochs


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "shards"
    tokens = np.random.default_rng(0).integers(0, 512, (SHARDS * SAMPLES, 400)).astype(np.uint16)
    write_folder(
        path,
        tokens=tokens,
        labels=np.arange(len(tokens)) % 3,
        samples_per_shard=SAMPLES,
        class_names=["a", "b", "c"],
    )
    return path


@pytest.fixture(scope="module")
def server(shards):
    with open_server(shards.parent / "moto.log") as server:
        server.upload(shards, "bucket")
        yield server


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    # Closed before the folder of the test is deleted, which faults read.
    with open_store(server, monkeypatch) as store:
        yield store


def tars(asked):
    return {name: count for name, count in asked.items() if name.endswith(".tar")}


def tar_bytes(path):
    return max(file.stat().st_size for file in path.glob("*.tar"))


def other_bytes(path):
    names = ["manifest.json", "palette.npy", "samples.index"]
    return sum((path / name).stat().st_size for name in names)


def room_for(path, count):
    return other_bytes(path) + count * tar_bytes(path)


def equal_inputs(one, other):
    return one.keys() == other.keys() and all((one[at] == other[at]).all() for at in one)


def cached(cache):
    return {file.name for file in cache.glob("*/*.tar")}


@contextmanager
def locked(cache):
    """While a cache is locked, no file of it gets or loses its name or its size."""
    with (cache / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_for(condition):
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("window", [None, 2])
def test_training_reads_what_the_folder_has_and_each_shard_once(store, shards, tmp_path, window):
    local = ShardDataset(shards, window_shards=window)
    remote = ShardDataset("s3://bucket", cache=tmp_path, window_shards=window)
    assert not cached(tmp_path)
    for ranks, micro in ((1, 12), (2, 3)):
        wanted = inputs_by_position(local, micro=micro, ranks=ranks, stop=STEPS)
        found = inputs_by_position(remote, micro=micro, ranks=ranks, stop=STEPS)
        assert equal_inputs(wanted, found)
    assert (remote.labels == local.labels).all()
    assert tars(store.asked) == {f"shard-{number:06d}.tar": 1 for number in range(SHARDS)}
    assert not any("index.json" in name for name in store.asked)


def test_a_training_run_is_the_local_one(store, shard_folders, train_small, tmp_path):
    store.upload(shard_folders / "train", "train")
    local, remote = (
        read_metrics(train_small(tmp_path / name, *words))
        for name, words in (
            ("local", []),
            ("remote", ["data.train=s3://train", f"data.cache={tmp_path}/cache"]),
        )
    )
    assert store.asked["shard-000000.tar"] == 1
    losses = [row["loss"] for row in local if "loss" in row]
    assert losses
    assert losses == [row["loss"] for row in remote if "loss" in row]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_bounded_cache_stays_within_its_size(store, shards, tmp_path, count):
    """Also a cache of one window alone, on the border of two."""
    local = ShardDataset(shards, window_shards=2)
    wanted = inputs_by_position(local, micro=1, ranks=1, stop=STEPS)
    limit, most = room_for(shards, count), [0]

    def measure(request):
        with locked(tmp_path):
            most.append(sum(file.stat().st_size for file in tmp_path.glob("*/*")))

    store.fault = measure
    remote = ShardDataset("s3://bucket", cache=tmp_path, cache_limit=limit, window_shards=2)
    assert equal_inputs(wanted, inputs_by_position(remote, micro=1, ranks=1, stop=STEPS))
    assert 0 < max(most) <= limit
    assert len(cached(tmp_path)) <= count
    if count == 4:
        # Once for each window that was read, or fetched ahead: two more than two epochs.
        windows = [local.order(5).shards_in(window) for window in range(SHARDS + 2)]
        for shard in range(SHARDS):
            times = sum(shard in window for window in windows)
            assert 1 <= store.asked[f"shard-{shard:06d}.tar"] <= times


def test_the_next_window_is_fetched_while_this_one_is_read(store, tmp_path):
    remote = ShardDataset("s3://bucket", cache=tmp_path, window_shards=2)
    order, windows = remote.order(5), WindowedOrder([SAMPLES] * SHARDS, 2, 5)
    windows = [{f"shard-{each:06d}.tar" for each in windows.shards_in(at)} for at in range(3)]
    remote.read(order.dataset_index(np.arange(2)))
    wait_for(lambda: cached(tmp_path) == windows[0] | windows[1])
    time.sleep(0.05)
    assert cached(tmp_path) == windows[0] | windows[1]
    order.dataset_index(np.array([2 * SAMPLES]))
    wait_for(lambda: cached(tmp_path) == windows[0] | windows[1] | windows[2])


def test_a_run_that_goes_back_is_read_ahead_too(store, tmp_path):
    """As after a rollback; another reader of the same order does not stop it."""
    remote = ShardDataset("s3://bucket", cache=tmp_path, window_shards=2)
    windows = WindowedOrder([SAMPLES] * SHARDS, 2, 5)
    orders = remote.order(5), remote.order(5)
    first = np.array([2 * 2 * SAMPLES])
    for order, positions in ((orders[0], first), (orders[1], first - 1), (orders[0], first)):
        remote.read(order.dataset_index(positions))
    ahead = {f"shard-{shard:06d}.tar" for at in (2, 3) for shard in windows.shards_in(at)}
    wait_for(lambda: ahead <= cached(tmp_path))
    remote.read(remote.order(5).dataset_index(np.array([0])))
    wait_for(lambda: len(cached(tmp_path)) == SHARDS)


def busy(request):
    if request.turn < 2:
        request.status, request.body = 503, BUSY


def broken(request):
    if request.turn < 2:
        request.status, request.body = 500, b""


def slow(request):
    if request.turn < 1:
        time.sleep(0.8)


def cut(request):
    if request.turn < 2:
        request.send = len(request.body) // 2


def wrong(request):
    if request.turn < 2 and request.name.endswith((".tar", ".index")):
        request.body = request.body[:-1] + bytes([request.body[-1] ^ 1])


@pytest.mark.parametrize("fault", [busy, broken, slow, cut, wrong])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_failures_of_the_way_lose_nothing(store, shards, tmp_path, scheme, fault, monkeypatch):
    store.fault = fault
    if fault is slow:
        monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 0.4}})
        monkeypatch.setattr(stores, "_STALLED_SECONDS", 0.4)
    url = "s3://bucket" if scheme == "s3" else f"{store.url}/bucket"
    remote = ShardDataset(url, cache=tmp_path)
    indices = np.arange(3 * SAMPLES)[::-1]
    assert (remote.read(indices)[0] == ShardDataset(shards).read(indices)[0]).all()
    asked = tars(store.asked)
    assert asked.keys() == {f"shard-{number:06d}.tar" for number in range(3)}
    # On a busy machine other answers may be slow too.
    assert min(asked.values()) == 2 if fault is slow else set(asked.values()) == {3}
    assert not list(tmp_path.glob("*/.*"))


def test_files_of_many_blocks_go_on_where_they_were_cut(store, shards, tmp_path, monkeypatch):
    """A server without ranges sends the file from its beginning."""
    monkeypatch.setattr(stores, "_BLOCK_BYTES", 1_000)
    size = tar_bytes(shards)

    def every_third(request):
        if request.name.endswith(".tar") and request.turn % 3 == 2:
            request.send = 10

    store.fault = every_third
    expected = ShardDataset(shards).read(np.arange(SAMPLES))[0]
    remote = ShardDataset("s3://bucket", cache=tmp_path / "s3")
    assert (remote.read(np.arange(SAMPLES))[0] == expected).all()
    blocks = -(-size // 1_000)
    assert blocks < store.asked["shard-000000.tar"] <= blocks * 3 // 2 + 1
    content = (shards / "shard-000000.tar").read_bytes()

    def without_ranges(request):
        if request.name.endswith(".tar"):
            request.status, request.body = 200, content

    store.fault = without_ranges
    remote = ShardDataset(f"{store.url}/bucket", cache=tmp_path / "http")
    assert (remote.read(np.arange(SAMPLES))[0] == expected).all()


def test_a_store_that_stays_broken_is_given_up(store, tmp_path):
    """By an error after which a launcher starts the run again."""
    remote = ShardDataset("s3://bucket", cache=tmp_path)
    for answer, reason in (((503, BUSY), "busy"), ((200, b"x"), "1 of")):

        def fail(request, answer=answer):
            request.status, request.body = answer

        store.fault = fail
        store.asked.clear()
        with pytest.raises(OSError, match=f"shard-000001.tar cannot be .* after 6 .*{reason}"):
            remote.read(np.array([SAMPLES]))
        assert sum(store.asked.values()) == stores.ATTEMPTS
    assert not cached(tmp_path)


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_absent_and_forbidden_are_one_sentence_at_once(store, tmp_path, scheme):
    url = "s3://bucket" if scheme == "s3" else f"{store.url}/bucket"

    def forbid(request):
        request.status, request.body = 403, DENIED

    remote = ShardDataset(url, cache=tmp_path)
    store.fault = forbid
    store.asked.clear()
    check = r"AWS_PROFILE.*AWS_ENDPOINT_URL" if scheme == "s3" else "fresh signature"
    refusal = rf"^{url}/shard-000000\.tar may not be read, or does not exist .*: check .*{check}"
    with pytest.raises(UserError, match=refusal) as caught:
        remote.read(np.array([0]))
    assert "\n" not in str(caught.value)
    assert store.asked == {"shard-000000.tar": 1}
    store.fault = None
    with pytest.raises(UserError, match=rf"^{url}/none/manifest\.json does not exist: check "):
        ShardDataset(f"{url}/none", cache=tmp_path)
    if scheme == "s3":
        with pytest.raises(UserError, match=r"^s3://nobody/manifest\.json does not exist: "):
            ShardDataset("s3://nobody", cache=tmp_path)


def test_what_is_missing_on_this_machine_is_said(store, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"gs:// cannot be read here: run .*megavis\[gcs\]"):
        ShardDataset("gs://bucket", cache=tmp_path)
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(UserError, match=r"needs credentials .*: check AWS_PROFILE"):
        ShardDataset("s3://bucket", cache=tmp_path)


def test_endpoint_and_keys_from_fsspecs_own_configuration(store, tmp_path, monkeypatch):
    for name in (*KEYS, "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    own = {"endpoint_url": store.url, "key": "a", "secret": "b"}
    monkeypatch.setitem(fsspec.config.conf, "s3", own)
    s3fs.S3FileSystem.clear_instance_cache()
    assert len(ShardDataset("s3://bucket", cache=tmp_path)) == SHARDS * SAMPLES
    s3fs.S3FileSystem.clear_instance_cache()


def reader(url, cache, limit, rank, out):
    script = Path(store_reader.__file__)
    words = [url, cache, limit, 2, rank, 2, 2 * SHARDS, out]
    return subprocess.Popen([sys.executable, script, *map(str, words)])


def test_processes_of_a_machine_share_the_cache(store, shards, tmp_path):
    url, cache, limit = f"{store.url}/bucket", tmp_path / "cache", room_for(shards, 4)
    outs = [tmp_path / f"{rank}.npy" for rank in range(2)]
    readers = [reader(url, cache, limit, rank, out) for rank, out in enumerate(outs)]
    assert [each.wait(120) for each in readers] == [0, 0]
    for rank, out in enumerate(outs):
        wanted = store_reader.read(str(shards), "", 0, 2, rank, 2, 2 * SHARDS)
        assert (np.load(out) == wanted).all()
    assert sum(file.stat().st_size for file in cache.glob("*/*")) <= limit


def test_kill_leaves_nothing_that_is_taken_for_a_shard(store, shards, tmp_path):
    stopped = []

    def stall(request):
        if request.name.endswith(".tar"):
            stopped.append(request.name)
            time.sleep(1 if len(stopped) == 1 else 0)

    store.fault = stall
    url, cache = f"{store.url}/bucket", tmp_path / "cache"
    child = reader(url, cache, room_for(shards, 4), 0, tmp_path / "0.npy")
    wait_for(lambda: stopped)
    with locked(cache):
        child.kill()
        child.wait()
    partials = list(cache.glob("*/.*.partial"))
    # They have their shards' size already, but not their content.
    assert f".{stopped[0]}.partial" in {file.name for file in partials}
    for file in partials:
        name = file.name.removeprefix(".").removesuffix(".partial")
        assert file.stat().st_size == (shards / name).stat().st_size
    remote = ShardDataset(url, cache=cache)
    assert not list(cache.glob("*/.*.partial"))
    samples = np.arange(SHARDS * SAMPLES)
    assert (remote.read(samples)[0] == ShardDataset(shards).read(samples)[0]).all()


def test_keys_come_from_json_indexes_on_demand(store, tmp_path):
    remote = ShardDataset("s3://bucket", cache=tmp_path)
    assert remote.name_of(SAMPLES + 1) == f"shard-000001.tar:{SAMPLES + 1:09d}"
    assert [name for name in store.asked if "json" in name] == [
        "manifest.json",
        "shard-000001.index.json",
    ]
