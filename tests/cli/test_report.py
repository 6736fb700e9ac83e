"""The summary of a run by `megavis report`."""

import dataclasses
import html
import json
import math

import pytest
from made_results import made, made_classes, made_probe, write_results

from megavis.cli import main
from megavis.evaluation.images.results import BaselineAnswer, NamedRight

pytestmark = pytest.mark.once


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    records = [
        {"step": 0, "validation_loss": math.log(512)},
        {"step": 10, "loss": 4.0},
        {"step": 20, "loss": 3.0, "validation_loss": 3 * math.log(2)},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run / "palette.npy").touch()
    write_start(run, {"dimension": "colour of a vocabulary of 512", "per_loss": 1})
    return run


def write_start(run, likelihood):
    (run / "starts.jsonl").write_text(json.dumps({"likelihood": likelihood}) + "\n")


def test_summary_of_losses_probe_and_images(folder, capsys):
    probe = made_probe(0.75, 0.5, 0.25, layer=3)
    write_results(folder, probe=probe, finetune_test=made_classes(0.625))
    names = ("samples-00000010", "samples-00000020", "completions-00000020", "step-00000020")
    for name in names:
        (folder / "samples" / f"{name}.png").touch()

    assert main(["report", str(folder)]) == 0

    printed = capsys.readouterr().out
    assert "step 20" in printed
    assert "6.2383 before, 2.0794 after, nats per token" in printed
    assert "9.0000 before, 3.0000 after, bits per dimension" in printed
    assert [line.split() for line in printed.splitlines() if "%" in line] == [
        ["linear", "probe", "trained", "75.0%", "layer", "3"],
        ["untrained", "50.0%"],
        ["raw", "pixels", "25.0%"],
        ["classes", "test", "images", "62.5%", "of", "40"],
    ]
    assert str(folder / "samples" / "samples-00000020.png") in printed
    assert str(folder / "samples" / "completions-00000020.png") in printed
    assert "samples-00000010" not in printed
    assert f"tensorboard --logdir {folder / 'tensorboard'}" in printed


def test_summary_of_reconstructions_and_classes(folder, capsys):
    lost = made("reconstruction.json", psnr=18.25, ssim=0.625)
    real, drawn = NamedRight(8, 1.0, {}), NamedRight(40, 0.625, {})
    named = made("classes.json", real_images=real, samples=drawn, reconstructions=None)
    write_results(folder, reconstruction=lost, classes=named)
    assert main(["report", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = lines.index(["reconstruction", "PSNR", "18.25", "dB"])
    # Without --tokenizer there is no row for the VAE.
    assert lines[start + 1 : start + 4] == [
        ["SSIM", "0.62"],
        ["named", "right", "samples", "62.5%", "of", "40"],
        ["real", "images", "100.0%", "of", "8"],
    ]


def test_completions_without_any_error(folder, capsys):
    """A blank lower half repeats the row above it exactly; the mean is of the squared errors."""
    rows = "image,psnr_completed,psnr_mean_of_completions,psnr_last_row_repeated\n"
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "completions.csv").write_text(
        f"{rows}0,20.0,23.0,inf\n1,10.0,23.0,inf\n"
    )
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "lower halves" in printed
    assert [line.split()[-3:] for line in printed.splitlines() if " dB" in line] == [
        ["completion", "12.60", "dB"],
        ["several", "23.00", "dB"],
        ["repeated", "inf", "dB"],
    ]


@pytest.mark.parametrize("text", ["name: run\n  seed: 1\n", "- name\n"])
def test_a_config_that_cannot_be_read_is_named(folder, capsys, text):
    (folder / "config.yaml").write_text(text)
    assert main(["report", str(folder)]) == 2
    assert f"error: {folder / 'config.yaml'}" in capsys.readouterr().err


def test_summary_of_label_maps(folder, capsys):
    depth = made("depth_errors.json", images=8)
    write_results(folder, panoptic=made("panoptic.json", images=8), depth_errors=depth)
    quality, errors = made("panoptic.json").overall, dataclasses.replace(depth.overall, rmse=1.25)
    answers = [
        BaselineAnswer("one segment", dataclasses.replace(quality, pq=3.0)),
        BaselineAnswer("mean map", errors),
    ]
    BaselineAnswer.write(folder / "evaluation" / "label_map_baselines.json", answers)
    assert main(["report", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("panoptic quality all classes 62.50 of 8 images")
    assert lines[start + 1 : start + 6] == [
        "things 50.00 of 8 images",
        "stuff 81.25 of 8 images",
        "depth RMSE 0.44 m of 8 images",
        "without a model one segment 3.00",
        "mean map 1.25 m",
    ]


def test_bits_only_where_the_loss_is_a_likelihood(folder, capsys):
    # GIVT sums the nats of a token's numbers; 3 ln 2 over 4 of them.
    write_start(folder, {"dimension": "number of the VAE's latents", "per_loss": 4})
    assert main(["report", str(folder)]) == 0
    assert "2.2500 before, 0.7500 after, bits per dimension" in capsys.readouterr().out
    # BERT also has a palette.
    write_start(folder, None)
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "6.2383 before, 2.0794 after\n" in printed
    assert "bits per dimension" not in printed


def test_files_of_another_form_are_named(folder, capsys):
    (folder / "evaluation").mkdir()
    files = {
        "probe.json": '{"step": 20}',
        "panoptic.json": "[]",
        # With the content of probe.json, as `megavis figure depth` writes it.
        "depth.json": '{"best_layer": {"layer": 3, "accuracy": 0.75}}',
        "positions.csv": "mask_ratio,accuracy\n",
        "reconstruction.json": '{"psnr": 1',
    }
    for name, content in files.items():
        (folder / "evaluation" / name).write_text(content)
    write_results(folder, likelihood=made("likelihood.json", nats_per_dimension=2.5))
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "per dimension   2.50 nats" in printed
    refused = [line.split(maxsplit=3)[3] for line in printed.splitlines() if "cannot be" in line]
    evaluation = folder / "evaluation"
    assert refused == [
        f"{evaluation}/probe.json is not a result of `megavis probe`: `best_layer` is missing",
        f"{evaluation}/positions.csv is not a result of `megavis figure positions`: it has no rows",
        f"{evaluation}/reconstruction.json is not a result of `megavis evaluate reconstruction`:"
        " it is not JSON (Expecting ',' delimiter: line 1 column 11 (char 10))",
        f"{evaluation}/panoptic.json is not a result of `megavis evaluate panoptic`: it should"
        " hold JSON objects, not '[]'",
    ]
    page = html.unescape((folder / "report.html").read_text())
    assert all(reason in page for reason in refused)
    assert "likelihood, per dimension" in page
    assert "Linear probe by layer" in page


def test_summary_of_paper_figures(folder, capsys):
    (folder / "evaluation").mkdir()
    tables = {
        "positions": "mask_ratio,accuracy,of_context,of_masked,chance\n"
        "0.0,0.8125,0.8125,nan,0.0625\n0.5,0.5,0.5,0.5,0.0625\n",
        # Errors are averaged before the logarithm: the mean of 0.1 and 0.001 is 12.97 dB.
        "completions": "image,psnr_completed,psnr_mean_of_completions,psnr_last_row_repeated\n"
        "0,10.0,20.0,5.0\n1,30.0,20.0,5.0\n",
        "groups": "groups,psnr,psnr_of_images\n1,17.5,18.0\n12,16.25,18.0\n",
        "reconstructions": "hidden,psnr,psnr_of_images\npredicted,14.5,15\nmean colours,9.25,9\n",
    }
    for name, table in tables.items():
        (folder / "evaluation" / f"{name}.csv").write_text(table)
    assert main(["report", str(folder)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("in their place none masked 81.2%")
    assert lines[start + 1 : start + 10] == [
        "half masked 50.0%",
        "chance 6.2%",
        "lower halves one completion 12.97 dB",
        "mean of several 20.00 dB",
        "row repeated 5.00 dB",
        "what was hidden all at once 17.50 dB",
        "12 groups 16.25 dB",
        "hidden patches predicted 14.50 dB",
        "mean colours 9.25 dB",
    ]


def test_page_that_cannot_be_written_can_go_elsewhere(folder, tmp_path, capsys):
    (folder / "report.html").mkdir()
    assert main(["report", str(folder)]) == 2
    expected = f"{folder}/report.html cannot be written: Is a directory; name another place with"
    assert f"error: {expected} --html\n" in capsys.readouterr().err
    assert main(["report", str(folder), "--html", str(tmp_path / "new" / "page.html")]) == 0
    assert (tmp_path / "new" / "page.html").exists()


def test_summary_without_validation(folder, capsys):
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 6.0}\n{"step": 2, "loss": 5.0}\n')
    (folder / "samples" / "step-00000002.png").touch()
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "training loss     6.0000 before, 5.0000 after" in printed
    assert "step-00000002.png" in printed
    assert "probe" not in printed


def test_invalid_run_folders(tmp_path, folder, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("")
    assert main(["report", str(folder)]) == 2
    assert "training writes its first line" in capsys.readouterr().err


def test_run_without_metrics_is_explained(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("name: imported\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "a report is of a trained run, not of imported weights" in capsys.readouterr().err
