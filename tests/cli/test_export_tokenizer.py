"""An export of a run with a tokenizer opens where neither of the two runs exists."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from children import open_child

import megavis
from megavis.checkpoint.format.folder import chosen_checkpoint
from megavis.checkpoint.format.manifest import MANIFEST, read_manifest
from megavis.cli import main
from megavis.parallel.context import close_context
from megavis.tokenizers.network_tokenizer import open_tokenizer

GOLDEN = Path(__file__).parents[1] / "data" / "givt"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export whose runs are gone, and images of its run, which records its tokenizer."""
    folder, runs = tmp_path_factory.mktemp("exported") / "givt", tmp_path_factory.mktemp("runs")
    assert main(["import", "givt-vae", str(GOLDEN / "vae.npz"), str(runs / "vae")]) == 0
    options = ["--num-classes", "10", "--tokenizer", str(runs / "vae")]
    source, run = str(GOLDEN / "givt_causal.npz"), str(runs / "givt")
    assert main(["import", "givt", source, run, *options]) == 0
    record_tokenizer(Path(run), open_tokenizer(runs / "vae").identity())
    images = sampled(run)
    assert main(["export", run, "--to", "huggingface", str(folder)]) == 0
    copied, first = (open_tokenizer(each) for each in (folder / "tokenizer", runs / "vae"))
    assert copied.identity() == first.identity()
    runs.rename(runs.with_name("elsewhere"))
    return folder, images


def record_tokenizer(run, identity):
    """Record a tokenizer in a run's checkpoint, as training does."""
    path = chosen_checkpoint(run) / MANIFEST
    manifest = read_manifest(path.parent).model_copy(update={"tokenizer": identity})
    path.write_text(manifest.model_dump_json())


def sampled(folder):
    opened = megavis.load(folder, device="cpu")
    try:
        return opened.sample(labels=[3, 5], seed=1).numpy()
    finally:
        close_context()


def test_export_opens_and_samples(exported, tmp_path):
    folder, images = exported
    assert images.shape == (2, 16, 16, 3)
    assert np.array_equal(sampled(folder), images)
    words = ["--num-images", "2", "--device", "cpu", "--out", str(tmp_path / "grid.png")]
    before = sorted(folder.rglob("*"))
    with open_child(folder.parent) as run:
        assert np.array_equal(run(sampled, "givt"), images)
        assert run(main, ["sample", "givt", *words]) == 0
    assert sorted(folder.rglob("*")) == before
    card = (folder / "README.md").read_text()
    assert "Its tokenizer is in `tokenizer`." in card
    assert "tokenizer: tokenizer\n" in card


def test_import_copies_the_tokenizer(exported, tmp_path):
    folder, images = exported
    again = tmp_path / "again"
    assert main(["import", "huggingface", str(folder), str(again)]) == 0
    assert f"tokenizer: {again}/tokenizer\n" in (again / "config.yaml").read_text()
    assert np.array_equal(sampled(again), images)
    kept = read_manifest(chosen_checkpoint(again)).tokenizer
    assert kept == open_tokenizer(folder / "tokenizer").identity()


def test_export_without_its_tokenizer_is_refused(exported, tmp_path, capsys):
    folder, _ = exported
    config = folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("tokenizer: tokenizer", "tokenizer: runs/gone"))
    try:
        assert main(["export", str(folder), "--to", "huggingface", str(tmp_path / "again")]) == 2
    finally:
        config.write_text(text)
        close_context()
    assert "runs/gone is not a run folder" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def copy_of(folder, target):
    shutil.copytree(folder, target)
    return target


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["", "tokenizer"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "; it was truncated; export"),
        (flip, "its SHA-256 differs from the manifest, so it has changed since it was saved"),
        (lambda path: path.unlink(), "model.safetensors: missing, although the checkpoint's"),
        (
            lambda path: path.write_bytes(POINTER),
            "model.safetensors: a pointer of Git LFS in place",
        ),
        (lambda path: (path.parent / "config.yaml").unlink(), "config.yaml: missing; the folder"),
        (lambda path: shutil.rmtree(path.parent), "givt"),
        (lambda path: shutil.rmtree(path.parent / "checkpoints"), "checkpoints: no such folder"),
    ],
)
def test_damaged_folders_are_not_imported(exported, tmp_path, capsys, part, damage, sentence):
    folder = copy_of(exported[0], tmp_path / "givt")
    damage(folder / part / "model.safetensors")
    assert main(["import", "huggingface", str(folder), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert str(folder / part) in message
    assert ".." not in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()
