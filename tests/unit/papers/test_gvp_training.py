"""Runs of GVP: a changed tokenizer is refused, and `megavis sample` completes held-out images."""

import shutil

import pytest
from small_vqgan import write_untrained_run
from tiny import tiny

import megavis
from megavis.cli import main
from megavis.config.errors import UserError
from megavis.parallel.context import close_context


def test_changed_tokenizer_is_refused(image_shards, tmp_path, capsys):
    folder = tmp_path / "vqgan"
    folder.mkdir()
    write_untrained_run(folder)
    path = tmp_path / "p2d.yaml"
    path.write_text(
        tiny(
            "{name: gvp, variant: p2d, patch_size: 4, num_groups: 3, vocabulary_size: 12,"
            f" tokenizer: {folder}}}",
            shards=image_shards,
            name="p2d",
            output=f"{tmp_path}/runs",
            model={"num_layers": 1},
            training={"steps": 2, "batch_size": 4},
            checkpoint={"every": 1},
        )
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    shutil.rmtree(folder)
    folder.mkdir()
    write_untrained_run(folder, seed=1)
    capsys.readouterr()
    assert main(["train", str(path), "--device", "cpu"]) == 2
    assert "its tokenizer" in capsys.readouterr().err
    try:
        with pytest.raises(UserError, match="was trained with the tokenizer"):
            megavis.load(tmp_path / "runs" / "p2d", device="cpu")
    finally:
        close_context()


def test_sample_completes_a_quarter_by_default(image_shards, tmp_path):
    path = tmp_path / "p2p.yaml"
    path.write_text(
        tiny(
            "{name: gvp, patch_size: 4, num_groups: 3}",
            shards=image_shards,
            validates=True,
            name="p2p",
            output=f"{tmp_path}/runs",
            model={"num_layers": 1},
            training={"steps": 1, "batch_size": 4},
        )
    )
    assert main(["train", str(path), "--device", "cpu"]) == 0
    sample = ["sample", str(tmp_path / "runs" / "p2p"), "--device", "cpu", "--num-images", "2"]
    assert main([*sample, "--out", str(tmp_path / "default.png")]) == 0
    assert main([*sample, "--prefix", "0.25", "--out", str(tmp_path / "quarter.png")]) == 0
    assert (tmp_path / "default.png").read_bytes() == (tmp_path / "quarter.png").read_bytes()
