"""Tars on a real S3 server: the shards of a local folder, and each tar fetched once."""

from __future__ import annotations

import json
import pickle
import socket

import pytest
from image_files import tree
from image_sources import opened, small_jpeg, tar_bytes, web_members, write_tar
from object_store import BUSY, DENIED, open_server, open_store

from data_tools.__main__ import main

pytestmark = pytest.mark.once
TARS = 4


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """Tars, captions, failures and counts, as img2dataset writes them."""
    root = tmp_path_factory.mktemp("remote") / "web"
    for number in range(TARS):
        members = web_members(range(number * 10, number * 10 + 4), labels=True)
        write_tar(root / f"{number:05d}.tar", members)
        stats = {"count": 6, "successes": 4, "failed_to_download": 2, "failed_to_resize": 0}
        (root / f"{number:05d}_stats.json").write_text(json.dumps(stats | {"status_dict": {}}))
        (root / f"{number:05d}.parquet").write_bytes(b"PAR1")
    same = [("copy.jpg", small_jpeg(0)), ("copy.txt", b"words")]
    write_tar(root / "00004.tar", same)
    (root / "00005.tar").write_bytes(tar_bytes(web_members(range(90, 94)))[:3_000])
    return root


@pytest.fixture(scope="module")
def server(web):
    with open_server(web.parent / "moto.log") as server:
        server.upload(web, "web")
        yield server


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    # Closed before the folder of the test is deleted, which faults read.
    with open_store(server, monkeypatch) as store:
        yield store


def jpeg(source, out, *options):
    return main(["jpeg", str(source), "--out", str(out), "--size", "16", *map(str, options)])


@pytest.fixture(scope="module")
def local(web, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "out"
    assert jpeg(web, out) == 0
    return shards(out)


def shards(out):
    return {name: content for name, content in tree(out).items() if "shard-" in str(name)}


def every_second(request):
    if request.turn % 2 == 0:
        request.status, request.body = 503, BUSY


def cut(request):
    if request.name.endswith(".tar") and request.turn == 0:
        request.send = len(request.body) // 2


@pytest.mark.parametrize("fault", [None, every_second, cut])
def test_shards_are_those_of_a_folder(fault, store, local, tmp_path):
    store.fault = fault
    assert jpeg("s3://web", tmp_path / "out") == 0
    assert shards(tmp_path / "out") == local
    tars = {name: count for name, count in store.asked.items() if name.endswith(".tar")}
    assert len(tars) == TARS + 2
    assert set(tars.values()) == {1 if fault is None else 2}


def test_slices_patterns_and_selections(store, local, web, tmp_path):
    """As a SLURM array reads them: two tasks, one folder."""
    for number in (2, 1):
        assert jpeg("s3://web", tmp_path / "out", "--slice", f"{number}/2") == 0
    assert shards(tmp_path / "out") == local
    selections = []
    for name, place in (("http", f"{store.url}/web"), ("folder", web)):
        source, out = f"{place}/{{00000..00004}}.tar", tmp_path / name
        assert main(["filter", source, "--out", str(out), "--min-side", "8"]) == 0
        assert jpeg(source, tmp_path / f"chosen {name}", "--selection", out) == 0
        selections.append({path.name: path.read_bytes() for path in out.glob("dropped-*")})
    assert selections[0] == selections[1]
    assert b"near-duplicate of another picture" in selections[0]["dropped-000004.jsonl"]
    assert shards(tmp_path / "chosen http") == shards(tmp_path / "chosen folder")


def test_parts_can_be_sent_to_workers_of_any_engine(store, web):
    [first, *_] = opened("s3://web").parts(files_per_part=1, seed=0)
    [same, *_] = opened(web).parts(files_per_part=1, seed=0)
    sent = pickle.loads(pickle.dumps(first))
    refuse = AssertionError
    assert list(sent.pictures(refuse)) == list(same.pictures(refuse))


def test_a_store_that_fails_ends_the_command_and_a_rerun_goes_on(store, local, tmp_path, capsys):
    def fail(request):
        if request.name == "00002.tar":
            request.status, request.body = 503, BUSY

    store.fault = fail
    assert jpeg("s3://web", tmp_path / "out") == 1
    said = capsys.readouterr().out
    assert "not finished: s3://web/00002.tar cannot be fetched after 6 attempts" in said
    store.fault = None
    store.asked.clear()
    assert jpeg("s3://web", tmp_path / "out") == 0
    assert shards(tmp_path / "out") == local
    assert store.asked["00000.tar"] == 0, "what was finished is not fetched again"


def test_what_cannot_be_read_is_one_sentence(store, tmp_path, capsys):
    def deny(request):
        request.status, request.body = 403, DENIED

    for place, fault, words in (
        ("s3://nobody", None, "s3://nobody does not exist"),
        ("s3://web/none.tar", None, "s3://web/none.tar does not exist"),
        ("s3://web/00000.tar", deny, "s3://web/00000.tar may not be read, or does not exist"),
        ("pipe:cat web", None, "the output of a command cannot be listed"),
    ):
        store.fault = fault
        assert jpeg(place, tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    store.fault = None
    assert jpeg("s3://web", tmp_path / "out", "--layout", "folder") == 2
    assert "is a URL, from which only webdataset tars are read" in capsys.readouterr().err


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_web_server_is_asked_again(status, store, web, tmp_path, capsys):
    """fsspec calls any answer to the question for a size, except a size, a missing file."""

    def busy(request):
        if request.name == "00001.tar" and request.turn == 0:
            request.status, request.body = status, BUSY

    def always_busy(request):
        request.status, request.body = status, BUSY

    source = f"{store.url}/web/{{00000..00001}}.tar"
    store.fault = busy
    assert jpeg(source, tmp_path / "out") == 0
    assert jpeg(str(web / "{00000..00001}.tar"), tmp_path / "local") == 0
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    capsys.readouterr()
    store.fault = always_busy
    assert jpeg(source, tmp_path / "none") == 1
    assert "00000.tar cannot be fetched after 6 attempts: " in capsys.readouterr().err


def test_a_web_server_that_refuses_or_is_gone(store, tmp_path, capsys):
    def deny(request):
        request.status, request.body = 403, DENIED

    source = f"{store.url}/web/00000.tar"
    store.fault = deny
    assert jpeg(source, tmp_path / "out") == 2
    assert f"{source} may not be read, or does not exist (403" in capsys.readouterr().err
    store.fault = None
    assert jpeg(f"{store.url}/web/none.tar", tmp_path / "out") == 2
    assert "/web/none.tar does not exist: " in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert jpeg(f"http://127.0.0.1:{port}/00000.tar", tmp_path / "out") == 1
    assert "00000.tar cannot be fetched after 6 attempts: " in capsys.readouterr().err


def test_failures_of_downloads_are_told(web, tmp_path, capsys):
    assert jpeg(web, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "img2dataset: 24 URLs, 16 images, 8 failed to download, 0 to resize" in said
    assert "2 tars without _stats.json, which img2dataset writes last" in said
    assert "skipped, tar cut off: what follows in it is lost: 1 (the first: 00005.tar)" in said
