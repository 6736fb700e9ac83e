"""`megavis evaluate panoptic` and `depth` on reconstructions and on predictions from images."""

import json

import numpy as np
import pytest
import torch
from label_map_config import write_label_map_config
from scene_shards import write_scene_shards

import megavis
from megavis.cli import main
from megavis.commands.opening import job_closed
from megavis.data.codecs.jpeg import decode_png, split
from megavis.data.codecs.label_maps import nearest
from megavis.data.codecs.transforms import Transform
from megavis.data.loading.dataset import ShardDataset
from megavis.evaluation.images.pair_metrics import DepthErrors, PanopticQuality
from megavis.tokenizers.network_tokenizer import open_tokenizer

pytestmark = pytest.mark.once
SECOND = """\
name: {kind}_from_images
output: {folder}/runs
objective: {{name: givt_encoder_decoder, encoder_layers: 1, encoder_patch_size: 8,
  latent_channels: 4, downsampling: 8, tokenizer: {folder}/runs/{kind},
  encoder_learning_rate_scale: 0.1}}
model: {{num_layers: 1, hidden_size: 32, num_attention_heads: 4, normalization: layer_norm}}
data: {{train: {folder}/{kind}/train, validation: {folder}/{kind}/validation, image_size: 32,
  crop: random_resized}}
optimizer: {{algorithm: adafactor, learning_rate: 1e-3}}
training: {{steps: 3, batch_size: 4, sample_every: 3, sample_images: 2}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scenes of 48² pixels, and runs at 32²: a VAE and a second stage of each kind of maps."""
    folder = write_scene_shards(tmp_path_factory.mktemp("maps"), size=48)
    for kind in ("panoptic", "depth"):
        assert main(["train", str(write_label_map_config(folder, kind)), "--device", "cpu"]) == 0
        path = folder / f"{kind}_from_images.yaml"
        path.write_text(SECOND.format(kind=kind, folder=folder))
        assert main(["train", str(path), "--device", "cpu"]) == 0
        assert list((folder / "runs" / f"{kind}_from_images" / "samples").glob("*.png"))
    return folder


def evaluate(kind, run, *words):
    assert main(["evaluate", kind, str(run), *words, "--device", "cpu"]) == 0
    name = {"panoptic": "panoptic", "depth": "depth_errors"}[kind]
    return json.loads((run / "evaluation" / f"{name}.json").read_text())


@pytest.mark.parametrize("kind", ["panoptic", "depth"])
def test_reconstruction_metrics_match_a_loop(folder, kind):
    result = evaluate(kind, folder / "runs" / kind)
    tokenizer = open_tokenizer(folder / "runs" / kind)
    dataset = ShardDataset(folder / kind / "validation", Transform(32, crop="center"))
    metric = PanopticQuality(5) if kind == "panoptic" else DepthErrors()
    for number in range(len(dataset)):
        pairs = torch.from_numpy(dataset.read(np.array([number]))[0])
        made = tokenizer.decode(tokenizer.encode(pairs[:, 1])[:, 0])[0].numpy()
        truth = decode_png(split(dataset.payload(number))[1])
        assert truth.shape == (48, 48, 3)
        metric.add(truth, nearest(made, height=48, width=48))
    expected = metric.quality() if kind == "panoptic" else metric.scores()
    assert result["all"] == pytest.approx(expected.record())
    assert result["images"] == 6


@pytest.mark.parametrize(("kind", "metric"), [("panoptic", "PQ"), ("depth", "RMSE")])
def test_run_folder_has_the_table_of_the_paper(folder, kind, metric):
    first, second = folder / "runs" / kind, folder / "runs" / f"{kind}_from_images"
    scores = [evaluate(kind, run)["all"][metric] for run in (first, second)]
    digits = 1 if kind == "panoptic" else 3
    own = [f"{score:.{digits}f}" for score in scores]
    for run, count in ((first, 1), (second, 2)):
        text = (run / "evaluation" / "dense_prediction.md").read_text()
        [line] = [line for line in text.splitlines() if line.startswith(f"| {run.name} |")]
        assert [cell.strip() for cell in line.split("|") if cell.strip()][1:] == own[:count]
        assert f"6 images of {folder}/{kind}/validation: other data, unless" in text
    assert main(["report", str(second)]) == 0
    page = (second / "report.html").read_text()
    assert "Dense prediction" in page
    assert f"{own[1]} {metric}" in page or f"{own[1]} m {metric}" in page


def contents(folder):
    """Return the bytes of all files but the list of commands."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "commands.jsonl"]
    return {path: path.read_bytes() for path in files}


def test_results_in_another_folder(folder, tmp_path):
    """The run may be someone else's, on a disk that can only be read."""
    run = folder / "runs" / "depth_from_images"
    first = evaluate("depth", run)
    table = (run / "evaluation" / "dense_prediction.md").read_text()
    before = contents(run)
    words = ["depth", str(run), "--out", str(tmp_path / "new" / "mine.json"), "--device", "cpu"]
    assert main(["evaluate", *words]) == 0
    assert json.loads((tmp_path / "new" / "mine.json").read_text()) == first
    assert (tmp_path / "new" / "dense_prediction.md").read_text() == table
    assert contents(run) == before


@pytest.mark.parametrize("kind", ["panoptic", "depth"])
def test_predictions_are_deterministic(folder, kind):
    run = folder / "runs" / f"{kind}_from_images"
    first = evaluate(kind, run, "--beams", "2", "--fans", "2", "--temperature", "0.9")
    again = evaluate(
        kind, run, "--beams", "2", "--fans", "2", "--temperature", "0.9", "--batch-size", "4"
    )
    assert first == again
    assert (first["beams"], first["temperature"]) == (2, 0.9)
    other = evaluate(kind, run, "--seed", "1", "--temperature", "0.9")
    assert other["all"] != first["all"]


def test_other_kinds_of_maps_are_refused(folder, capsys):
    words = ["evaluate", "depth", str(folder / "runs" / "panoptic"), "--device", "cpu"]
    assert main(words) == 2
    assert "holds no depth maps" in capsys.readouterr().err
    path = folder / "panoptic_from_images.yaml"
    words = [f"objective.tokenizer={folder}/runs/depth", "name=other", "--device", "cpu"]
    assert main(["train", str(path), *words]) == 2
    assert "holds panoptic maps; the VAE of objective.tokenizer encodes depth maps" in (
        capsys.readouterr().err
    )
    words = ["evaluate", "panoptic", str(folder / "runs" / "panoptic"), "--beams", "2"]
    assert main([*words, "--device", "cpu"]) == 2
    assert "--beams" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["panoptic", "depth"])
def test_likelihood_is_that_of_the_latents_given_the_image(folder, kind, capsys):
    run = folder / "runs" / f"{kind}_from_images"
    assert main(["likelihood", str(run), "--device", "cpu"]) == 0
    assert "64 per image, given the image" in capsys.readouterr().out
    result = json.loads((run / "evaluation" / "likelihood.json").read_text())
    dataset = ShardDataset(folder / kind / "validation", Transform(32, crop="center"))
    pairs = torch.from_numpy(dataset.read(np.arange(len(dataset)))[0])
    with job_closed():
        opened = megavis.load(run, device="cpu")
        latents = opened.objective.reads.of(pairs[:, 1], torch.arange(len(dataset)))
        outputs = opened.outputs(latents, image=pairs[:, 0])[..., 1:].double()
    means, raw = outputs.chunk(2, dim=-1)
    density = torch.distributions.Normal(means, (raw + (raw**2 + 4).sqrt()) / 2)
    nats = -density.log_prob(latents.flatten(2).transpose(1, 2).double()).sum((1, 2)).mean()
    assert result["nats_per_image"] == pytest.approx(float(nats), rel=1e-5)


@pytest.mark.parametrize("stage", ["{}", "{}_from_images"])
@pytest.mark.parametrize("kind", ["panoptic", "depth"])
def test_exports_predict_the_same_maps(folder, kind, stage, tmp_path):
    run, made = folder / "runs" / stage.format(kind), tmp_path / "export"
    assert main(["export", str(run), "--to", "huggingface", str(made)]) == 0
    again = tmp_path / "again"
    assert main(["import", "huggingface", str(made), str(again)]) == 0
    assert evaluate(kind, again)["all"] == evaluate(kind, run)["all"]
