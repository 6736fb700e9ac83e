"""Remote shard folders: caching, checks, retries and concurrent readers."""

from __future__ import annotations

import json
import shutil
import threading

import numpy as np
import pytest

from data_tools.__main__ import main as data_tools
from megavis.config.errors import UserError
from megavis.data.loading import stores
from megavis.data.loading.dataset import ShardDataset
from megavis.data.loading.remote import is_remote
from megavis.data.loading.stores import Store


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(stores, "PAUSE_SECONDS", 0)


def test_urls():
    assert is_remote("pipe:cat /data")
    assert is_remote("s3://bucket/train")
    assert not is_remote("shards/train")
    assert Store("s3://b/a b").url_of("x.tar") == "s3://b/a b/x.tar"
    piped = Store("pipe:ssh host cat {file} | cat")
    assert piped.url_of("x.tar") == "pipe:ssh host cat x.tar | cat"
    assert Store("https://host/train/").url_of("x.tar") == "https://host/train/x.tar"


@pytest.mark.parametrize("url", ["pipe:cat {}", "file://{}", "pipe:cat {}/{{file}} | cat"])
def test_read(url, folder, tmp_path):
    path, tokens, labels = folder
    cache = tmp_path / "cache"
    dataset = ShardDataset(url.format(path), cache=cache)
    assert (dataset.labels == labels).all()
    assert not list(dataset.directory.glob("*.tar"))
    assert (dataset.read(np.array([3, 12]))[0] == tokens[[3, 12]]).all()
    assert len(list(dataset.directory.glob("*.tar"))) == 2
    assert (dataset.read(np.arange(37))[0] == tokens).all()
    fetched = {file.name for file in dataset.directory.iterdir()}
    assert fetched == {file.name for file in path.iterdir() if ".index.json" not in file.name}
    # Only keys are looked up in the JSON indexes.
    assert dataset.name_of(12) == "shard-000001.tar:000000012"
    fetched = {file.name for file in dataset.directory.iterdir()} - fetched
    assert fetched == {"shard-000001.index.json"}
    # Cached files need nothing of the remote but its manifest.
    shutil.copy(path / "manifest.json", tmp_path)
    (tmp_path / "palette.npy").write_bytes(b"not read")
    again = ShardDataset(f"file://{tmp_path}", cache=cache)
    assert (again.read(np.arange(37))[0] == tokens).all()


@pytest.mark.parametrize("url", ["pipe:cat {}", "file://{}"])
def test_a_folder_of_an_earlier_version(url, folder, tmp_path):
    """Its manifest knows of no index, which is said at once, whatever the URL can tell."""
    path, tokens, _ = folder
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["index_sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "samples.index").unlink()
    place = url.format(path)
    with pytest.raises(UserError) as error:
        ShardDataset(place, cache=tmp_path / "cache")
    assert str(error.value) == (
        f"{place} was made before shard folders had samples.index: run `python -m data_tools index"
        " FOLDER` where its files are, and upload samples.index and manifest.json"
    )
    assert data_tools(["index", str(path)]) == 0
    dataset = ShardDataset(place, cache=tmp_path / "cache")
    assert (dataset.read(np.arange(37))[0] == tokens).all()


def test_an_index_that_was_not_uploaded(folder, tmp_path):
    path, _, _ = folder
    (path / "samples.index").unlink()
    made = r"if it is lost, run `python -m data_tools index FOLDER` where its files are"
    with pytest.raises(UserError, match=rf"samples\.index does not exist: .*; {made}"):
        ShardDataset(f"file://{path}", cache=tmp_path / "cache")


def flaky(tmp_path, path, *, failures, ending):
    """Return the URL of a command that fails `failures` times per tar, after half of it."""
    script = tmp_path / "flaky.sh"
    script.write_text(
        f"""
file={path}/$1; tries={tmp_path}/tries-$1
echo >> $tries
if [[ $1 == *.tar && $(wc -l < $tries) -le {failures} ]]
then head -c $(($(stat -c %s $file) / 2)) $file; {ending}
else cat $file
fi
"""
    )
    return f"pipe:bash {script} {{file}}"


@pytest.mark.parametrize("ending", ["exit 3", "exit 0", "kill -9 $$"])
def test_failed_downloads_are_retried(ending, folder, tmp_path):
    path, tokens, _ = folder
    url = flaky(tmp_path, path, failures=2, ending=ending)
    dataset = ShardDataset(url, cache=tmp_path / "cache")
    assert (dataset.read(np.arange(37))[0] == tokens).all()
    assert (tmp_path / "tries-shard-000002.tar").read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("ending", "reason"), [("exit 3", "exited with status 3"), ("exit 0", "it has 5632 bytes")]
)
def test_permanent_failure(ending, reason, folder, tmp_path):
    """Not a user's mistake, after which no launcher would start the run again."""
    url = flaky(tmp_path, folder[0], failures=99, ending=ending)
    dataset = ShardDataset(url, cache=tmp_path / "cache")
    with pytest.raises(OSError, match=rf"shard-000001\.tar cannot be fetched after 6 .*{reason}"):
        dataset.read(np.array([10]))
    assert not list(dataset.directory.glob("*.tar*"))
    assert not list(dataset.directory.glob(".*"))


@pytest.mark.parametrize("library", ["aiohttp", "httpx", "httpx2"])
def test_errors_of_a_network_library_are_transfer_failures(library):
    """Those of the Hub's client, `hf://`, came as a traceback and were not tried again."""
    error = type("ConnectError", (Exception,), {"__module__": library})("all attempts failed")
    with pytest.raises(OSError, match="cannot be fetched after 6 attempts: all attempts failed"):
        stores._give_up_or_wait("hf://datasets/a/b", error, failures=6, attempts=6)


def test_open_errors(folder, tmp_path, monkeypatch):
    path, _, _ = folder
    with pytest.raises(
        UserError, match=r"data\.cache: file://.* is a URL: set it to a local folder"
    ):
        ShardDataset(f"file://{path}")
    with pytest.raises(UserError, match=r"nowhere/manifest\.json does not exist"):
        ShardDataset("file:///nowhere", cache=tmp_path)
    with pytest.raises(UserError, match=r"odd://host/x/manifest\.json cannot be read"):
        ShardDataset("odd://host/x", cache=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"(Not a directory|File exists): .*/file"):
        ShardDataset(f"file://{path}", cache=tmp_path / "file")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="has 0.0 GB free"):
        ShardDataset(f"file://{path}", cache=tmp_path)


def test_versions_have_their_own_cache(folder, tmp_path):
    path, _, _ = folder
    first = ShardDataset(f"file://{path}", cache=tmp_path / "cache")
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    second = ShardDataset(f"file://{path}", cache=tmp_path / "cache")
    assert first.directory != second.directory


def test_concurrent_readers_fetch_a_shard_once(folder, tmp_path):
    path, tokens, _ = folder
    url = flaky(tmp_path, path, failures=0, ending="")
    datasets = [ShardDataset(url, cache=tmp_path / "cache") for _ in range(2)]
    wrong = []

    def read(dataset):
        wrong.extend(np.flatnonzero((dataset.read(np.arange(37))[0] != tokens).any(axis=1)))

    threads = [threading.Thread(target=read, args=(dataset,)) for dataset in datasets * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (tmp_path / "tries-shard-000000.tar").read_text() == "\n"
