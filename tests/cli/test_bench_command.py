"""`megavis bench`: output as text and as JSON."""

import json

from vae_config import write_config

from megavis.cli import main

SMALL = ["--steps", "2", "--device", "cpu"]


def test_text_output(small_config, capsys):
    assert main(["bench", str(small_config), *SMALL, "data.train=none"]) == 0
    out = capsys.readouterr().out
    assert "tp1-pp1-zero1, float32, batch 8, micro-batch 8" in out
    for word in ("images/s", "tokens/s", "of a matrix product's", "GB at most", "attention"):
        assert word in out
    assert "MFU" not in out, "the peak FLOP/s of a CPU are not known"


def test_json_output(small_config, capsys):
    assert main(["bench", str(small_config), *SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch_size"], result["num_processes"], result["layout"]) == (
        8,
        1,
        "tp1-pp1-zero1",
    )


def test_no_rate_is_shown_of_a_step_that_is_counted_in_part(tmp_path, capsys):
    """FLOPs of an autoencoder leave out its discriminator, so a rate would be too low."""
    words = [str(write_config(tmp_path)), *SMALL, "data.train=none", "data.validation=none"]
    words += ["training.sample_every=0", "training.validate_every=0"]
    assert main(["bench", *words]) == 0
    text = capsys.readouterr().out
    assert "TFLOP/s, " not in text
    assert "per device       unknown: the discriminator's" in text
    assert main(["bench", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tflops_per_device"] is None


def test_nothing_is_said_of_a_profiler_without_a_gpu(small_config, capfd):
    """It comes from C++, so that only the file descriptor of a process shows it."""
    assert main(["bench", str(small_config), *SMALL, "data.train=none"]) == 0
    written = capfd.readouterr()
    assert "USDT" not in written.err + written.out
    assert "gpuGetDeviceCount" not in written.err + written.out
