"""`--out s3://...`: the shards of a local folder, uploaded one by one, on an array of tasks."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from image_sources import web_members, write_tar
from object_store import BUSY, DENIED, open_server, open_store

from data_tools.__main__ import main
from megavis.data.loading.dataset import ShardDataset

pytestmark = pytest.mark.once
TARS, IMAGES = 4, 3


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    """Tars as img2dataset writes them, one of them without an image."""
    root = tmp_path_factory.mktemp("stored") / "web"
    for number in range(TARS):
        members = web_members(range(number * 10, number * 10 + IMAGES))
        write_tar(root / f"{number:05d}.tar", members)
    write_tar(root / "00004.tar", [("nothing.txt", b"words")])
    return root


@pytest.fixture(scope="module")
def server(web):
    with open_server(web.parent / "moto.log") as server:
        server.upload(web, "web")
        yield server


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    with open_store(server, monkeypatch) as store:
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        yield store


@pytest.fixture(scope="module")
def local(web, tmp_path_factory):
    """Files by name, of two sizes."""
    out = tmp_path_factory.mktemp("local") / "out"
    assert jpeg(web, out) == 0
    files = (path for path in out.rglob("*") if path.is_file() and path.name[0] != ".")
    return without_times({str(path.relative_to(out)): path.read_bytes() for path in files})


def jpeg(source, out, *options):
    words = ["jpeg", str(source), "--out", str(out), "--size", "8", "16"]
    return main([*words, *map(str, options)])


def without_times(files):
    reports = {
        name: {key: value for key, value in json.loads(content).items() if key != "measured"}
        for name, content in files.items()
        if name.endswith("report.json")
    }
    return files | reports


def most_tars(folder, seen):
    # Unlike rglob, walk passes over folders that vanish.
    names = [name for _, _, names in os.walk(folder) for name in names]
    seen.append(len(fnmatch.filter(names, "shard-*.tar")))


def test_a_store_gets_the_files_of_a_folder(store, local, web, tmp_path, capsys):
    """And this machine keeps nothing, and has one shard of each size at a time."""
    seen = []
    store.fault = lambda request: most_tars(tmp_path / "temporary", seen)
    assert jpeg(web, "s3://web/one") == 0
    store.fault = None
    assert without_times(store.download("web", "one/")) == local
    assert max(seen) == 2
    assert not list((tmp_path / "temporary").iterdir())
    said = capsys.readouterr().out
    assert f"s3://web/one/8: {TARS * IMAGES} samples in {TARS} shards" in said
    remote = ShardDataset("s3://web/one/16", cache=tmp_path / "cache")
    assert len(remote.read(np.arange(TARS * IMAGES))[0]) == TARS * IMAGES
    store.sent.clear()
    assert jpeg(web, "s3://web/one") == 0
    assert not [name for name in store.sent if "shard-" in name], "nothing is written again"
    assert jpeg(web, "s3://web/one", "--quality", "50") == 2
    assert "s3://web/one/8 holds shards made from other images" in capsys.readouterr().err


def test_uploads_that_fail_are_tried_again_or_end_the_command(store, local, web, tmp_path, capsys):
    def every_second(request):
        if request.is_upload and request.turn % 2 == 0:
            request.status, request.body = 503, BUSY

    store.fault = every_second
    assert jpeg(web, "s3://web/busy") == 0
    assert without_times(store.download("web", "busy/")) == local

    def third(request):
        if request.is_upload and request.name == "shard-000002.index.json":
            request.status, request.body = 503, BUSY

    store.fault = third
    assert jpeg(web, "s3://web/again") == 1
    said = capsys.readouterr().out
    assert "s3://web/again/8/shard-000002.index.json cannot be written after 6 attempts" in said
    assert "s3://web/again/report.json names the shards" in said
    there = store.download("web", "again/")
    assert json.loads(there["report.json"])["unfinished"]["shards"] == ["shard-000002.tar"]
    assert "8/manifest.json" not in there
    assert "8/shard-000002.index.json" not in there
    store.fault = None
    store.sent.clear()
    assert jpeg(web, "s3://web/again") == 0
    assert without_times(store.download("web", "again/")) == local
    assert store.sent["shard-000001.tar"] == 0
    assert store.sent["shard-000002.tar"] == 2, "one of each size"


def test_what_a_store_refuses_is_one_sentence(store, web, tmp_path, capsys):
    def deny(request):
        if request.is_upload:
            request.status, request.body = 403, DENIED

    for out, fault, words in (
        ("s3://web/no", deny, "s3://web/no/8/shard-000000.tar may not be written, or does not"),
        ("s3://none/no", None, "s3://none/no/8/shard-000000.tar does not exist: check the name of"),
        ("https://host/no", None, "https://host/no cannot be written: give s3:// or gs://"),
    ):
        store.fault = fault
        assert jpeg(web, out) == 2
        error = capsys.readouterr().err
        assert words in error, error
    store.fault = None
    assert main(["filter", str(web), "--out", "s3://web/no"]) == 2
    assert "s3://web/no is a URL: this command writes to a local folder" in capsys.readouterr().err
    assert jpeg("s3://web", "s3://web/inside") == 2
    assert "lies inside the source" in capsys.readouterr().err


ARRAY = """\
exec {python} -m data_tools jpeg s3://web --out s3://made/{out} --size 8 16 {options} \
    --slice $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT
"""


def run_array(count, out, temporary, *options):
    """Run the tasks of an array at the same time, as SLURM starts them; return their exit codes."""
    script = ARRAY.format(python=sys.executable, out=out, options=" ".join(map(str, options)))
    tasks = []
    for number in range(1, count + 1):
        (temporary / str(number)).mkdir(parents=True)
        variables = {
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_ARRAY_TASK_COUNT": str(count),
            "SLURM_ARRAY_TASK_MIN": "1",
            "SLURM_ARRAY_TASK_MAX": str(count),
            "TMPDIR": str(temporary / str(number)),
        }
        environment = {**os.environ, **variables}
        tasks.append(subprocess.Popen(["bash", "-c", script], env=environment))
    return [task.wait(240) for task in tasks]


def test_an_array_reads_a_bucket_once_and_fills_another(store, local, web, tmp_path):
    """With measurements in a folder that the tasks share: `filter` does not read the bucket."""
    store.upload(tmp_path / "temporary", "made")
    selection = tmp_path / "selection"
    options = ["--measure", selection]
    assert run_array(2, "all", tmp_path / "tasks", *options) == [0, 0]
    made = without_times(store.download("made", "all/"))
    assert made.keys() == local.keys()
    assert made == local
    tars = {name: count for name, count in store.asked.items() if name.startswith("0000")}
    assert set(tars.values()) == {1}, "each tar of the bucket is fetched once"
    assert not [name for name in made if "slice" in name]
    store.asked.clear()
    assert main(["filter", "s3://web", "--out", str(selection), "--min-side", "8"]) == 0
    assert not [name for name in store.asked if name.startswith("0000")]
    alone = tmp_path / "alone"
    assert main(["filter", str(web), "--out", str(alone), "--min-side", "8"]) == 0
    for path in alone.glob("dropped-*"):
        assert path.read_bytes() == (selection / path.name).read_bytes()


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'megavis[ray]' (240 MB, not a test dependency)",
)
def test_ray_reads_a_bucket_and_fills_another(store, local, tmp_path):
    store.upload(tmp_path / "temporary", "made")
    words = [sys.executable, "-m", "data_tools", "jpeg", "s3://web", "--out", "s3://made/ray"]
    words += ["--size", "8", "16", "--engine", "ray"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert without_times(store.download("made", "ray/")) == local
