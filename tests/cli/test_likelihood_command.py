"""`megavis likelihood` of a GIVT against a sum of densities over latents and positions."""

import json
import math

import pytest
import torch
from latent_shards import write_latent_shards
from shard_folder import with_classes

import megavis
from megavis.cli import main
from megavis.commands.opening import job_closed
from megavis.composition.encoded_tokens import Latents
from megavis.data.loading.dataset import ShardDataset
from megavis.training.provenance import read_commands

pytestmark = pytest.mark.once
SHAPE, NUM_IMAGES = (4, 4, 4), 70


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A short run without label dropout on latents of zero deviation."""
    folder = tmp_path_factory.mktemp("givt")
    sizes = {"shape": SHAPE, "num_classes": 3, "scale": 0.0}
    write_latent_shards(folder / "train", num_images=60, **sizes)
    write_latent_shards(folder / "validation", num_images=NUM_IMAGES, seed=1, **sizes)
    (folder / "small.yaml").write_text(
        f"""\
name: small
output: {folder}/runs
objective: {{name: givt, latent_channels: 4, downsampling: 4, num_classes: 3, num_components: 2,
  label_dropout: 0.0}}
model: {{num_layers: 1, hidden_size: 16, num_attention_heads: 2, normalization: layer_norm}}
data: {{train: {folder}/train, validation: {folder}/validation, image_size: 16}}
optimizer: {{learning_rate: 1e-2}}
training: {{steps: 5, batch_size: 8}}
"""
    )
    assert main(["train", str(folder / "small.yaml"), "--device", "cpu"]) == 0
    return folder / "runs" / "small"


def nats_of(run, dataset):
    """Sum -log p over images, positions and channels from the head's raw outputs (equation 2)."""
    inputs, labels = dataset.read(range(NUM_IMAGES))
    latents = torch.from_numpy(inputs[:, 0]).double()
    outputs = run.outputs(latents.float(), labels=torch.from_numpy(labels)).double()
    total = 0.0
    for place in range(16):
        token = latents[:, :, place // 4, place % 4]
        weights = outputs[:, place, :2].softmax(1)
        components = outputs[:, place, 2:].reshape(NUM_IMAGES, 2, 2, 4)
        density = torch.zeros(NUM_IMAGES, dtype=torch.float64)
        for component in range(2):
            mean, raw = components[:, component].unbind(1)
            scale = (raw + (raw**2 + 4).sqrt()) / 2
            exponent = (-(((token - mean) / scale) ** 2) / 2).sum(1).exp()
            density += weights[:, component] * exponent / (scale * math.sqrt(2 * math.pi)).prod(1)
        total -= float(density.log().sum())
    return total


def test_likelihood_matches_the_density(run_folder, capsys):
    assert main(["likelihood", str(run_folder), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    result = json.loads((run_folder / "evaluation" / "likelihood.json").read_text())
    dataset = ShardDataset(str(run_folder.parents[1] / "validation"))
    with job_closed():
        nats = nats_of(megavis.load(run_folder, device="cpu"), dataset)
    expected = nats / (NUM_IMAGES * 64)
    assert result["nats_per_dimension"] == pytest.approx(expected, rel=1e-5)
    assert result["bits_per_dimension"] == pytest.approx(expected / math.log(2), rel=1e-5)
    assert result["nats_per_image"] == pytest.approx(nats / NUM_IMAGES, rel=1e-5)
    assert (result["num_images"], result["dimensions_per_image"]) == (NUM_IMAGES, 64)
    assert "number of the VAE's latents; 64 per image, given the class" in printed


@pytest.mark.parametrize(
    ("scale", "dimension"), [(1.0, "latents"), (0.2325, "latents times 0.2325")]
)
def test_dimension_names_the_scale_of_latents(scale, dimension):
    """Scaling latents changes their density, so results are comparable only at the same scale."""
    sizes = {"channels": 4, "side": 4, "stacked": 1, "seed": 0, "image_size": 16}
    latents = Latents(scale=scale, tokenizer=None, beta=None, **sizes)
    assert latents.dimension == f"number of the VAE's {dimension}"


OTHERS = {
    "another order": (
        ("class-1", "class-0", "class-2"),
        " numbers its classes differently from {source}: write its shards with --classes-from, the",
    ),
    "no second one": (("class-0", "class-2"), "; it lacks 'class-1' of {source}"),
    "unknown": (("class-0", "class-1", "owl"), "; {source} has no class 'owl'"),
}


@pytest.mark.parametrize(("names", "message"), OTHERS.values(), ids=OTHERS)
def test_classes_of_other_numbers_are_refused(run_folder, tmp_path, capsys, names, message):
    folder, sizes = run_folder.parents[1], {"shape": SHAPE, "num_classes": len(names)}
    written = write_latent_shards(tmp_path / "written", num_images=12, seed=1, **sizes)
    other = str(with_classes(written, tmp_path / "other", names))
    assert main(["likelihood", str(run_folder), "--images", other, "--device", "cpu"]) == 2
    source = "the run's training set"
    said = capsys.readouterr().err
    assert f"{other} numbers its classes differently from {source}" in said
    assert message.format(source=source) in said
    words = ["train", str(folder / "small.yaml"), f"data.validation={other}", "name=refused"]
    assert main([*words, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"data.validation: {other} numbers its classes differently from data.train" in said
    assert message.format(source="data.train") in said
    # Features are compared with labels, whatever their numbers.
    words = ["--train", other, "--validation", other, "--device", "cpu"]
    assert main(["probe", str(run_folder), *words]) == 2
    assert "cannot evaluate what was trained on" in capsys.readouterr().err


def test_folders_with_too_many_classes_together_are_refused(run_folder, tmp_path, capsys):
    """Each has as many as the table; an index beyond it would end a job on a GPU."""
    folder, sizes = run_folder.parents[1], {"shape": SHAPE, "num_classes": 3, "num_images": 12}
    written = write_latent_shards(tmp_path / "written", seed=1, **sizes)
    other = with_classes(written, tmp_path / "other", ("class-0", "owl", "yak"))
    words = [str(folder / "small.yaml"), "--device", "cpu", "name=blend", "data.validation="]
    blend = f"data.train=[{{path: {folder}/train, weight: 1}}, {{path: {other}, weight: 1}}]"
    assert main(["train", *words, blend]) == 2
    message = "data.train: the blend of 2 folders has 5 classes; objective.num_classes is 3"
    assert message in capsys.readouterr().err
    assert main(["train", *words, blend, "objective.num_classes=5", "training.steps=1"]) == 0


def test_images_without_a_class_are_refused(run_folder, tmp_path, capsys):
    """This run has no embedding for them; the last class's would be taken."""
    sizes = {"shape": SHAPE, "num_classes": 3}
    other = write_latent_shards(tmp_path / "other", num_images=12, seed=1, labels=[0, -1], **sizes)
    words = ["--images", str(other), "--device", "cpu"]
    assert main(["likelihood", str(run_folder), *words]) == 2
    assert f"{other} holds 6 images without a label, of 12 in all" in capsys.readouterr().err


def test_report_shows_the_bits_of_the_validation_loss(run_folder, tmp_path, capsys):
    words = [f"output={tmp_path}", "training.validate_every=5", "training.validation_images=70"]
    config = str(run_folder.parents[1] / "small.yaml")
    assert main(["train", config, *words, "--device", "cpu"]) == 0
    assert main(["likelihood", str(tmp_path / "small"), "--device", "cpu"]) == 0
    result = json.loads((tmp_path / "small" / "evaluation" / "likelihood.json").read_text())
    capsys.readouterr()
    assert main(["report", str(tmp_path / "small")]) == 0
    bits = capsys.readouterr().out.partition(" after, bits per dimension")[0].split()[-1]
    assert float(bits) == pytest.approx(result["bits_per_dimension"], abs=2e-4)


def test_command_is_recorded(run_folder):
    before = len(read_commands(run_folder))
    assert main(["features", str(run_folder)]) == 0
    assert [line["command"] for line in read_commands(run_folder)[before:]] == [
        f"megavis features {run_folder}"
    ]


def test_only_rank_0_records_the_command(run_folder, monkeypatch):
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1"}
    for name, value in {**places, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    before = read_commands(run_folder)
    assert main(["features", str(run_folder)]) == 0
    assert read_commands(run_folder) == before
