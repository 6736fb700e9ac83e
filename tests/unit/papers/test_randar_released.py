"""`megavis import randar`: released weights of RandAR become runs."""

import argparse
import math
import re
from pathlib import Path

import pytest
import torch
from randar_equations import CLASSES, HEAD, IDS, SIDE, WIDTH, generator_logits, released, shapes
from released_tensors import assert_is_preset, on_meta
from safetensors.torch import save_file
from small_batches import HeldOutIds, run_layers
from small_vqgan import SMALL

import megavis
from megavis.cli import main
from megavis.config.load import load_config
from megavis.data.loading.loader import Batch
from megavis.evaluation.likelihood import measure_likelihood
from megavis.sampling.sampler import Sampler
from megavis.weights import randar
from megavis.weights import released as released_weights

pytestmark = pytest.mark.once


def imported(tmp_path, tensors, name="randar"):
    """Save a file, import it on a tokenizer of 16 ids, and return exit code and run folder."""
    folder = tmp_path / "vqgan"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(SMALL.format(output=tmp_path, shards="nowhere"))
    save_file(tensors, tmp_path / "randar.safetensors")
    run = tmp_path / "runs" / name
    words = [str(tmp_path / "randar.safetensors"), str(run), "--tokenizer", str(folder)]
    return main(["import", "randar", *words]), run


def opened(tmp_path, tensors):
    """Import, and open the run for images of 4 × 4 ids."""
    code, folder = imported(tmp_path, tensors)
    assert code == 0
    path = folder / "config.yaml"
    config = load_config(path).config
    assert (config.objective.patch_size, config.data.image_size) == (4, 64)
    text = path.read_text()
    assert "image_size: 64" in text
    path.write_text(text.replace("image_size: 64", f"image_size: {4 * SIDE}"))
    run = megavis.load(folder)
    assert run.config.model.head_size == HEAD
    for module in run.inference.layers.modules:
        # An imported run has dropout.
        module.eval()
    return run


@pytest.mark.usefixtures("context")
def test_imported_weights_equal_the_released_generator(tmp_path):
    tensors = released()
    run = opened(tmp_path, tensors)
    ids = torch.randint(IDS, (3, SIDE**2), generator=torch.Generator().manual_seed(3))
    samples = Batch(ids, torch.tensor([0, 4, -1]), torch.arange(7, 10))
    sequence = run.objective.sequence(samples)
    predictions = run_layers(run.inference.layers.modules, sequence.inputs)
    found = run.objective.outputs(predictions)
    orders = run.objective.schedule.at(None).draw(samples.sample_index).order.tolist()
    labels = [None if label == CLASSES else label for label in sequence.inputs[4].tolist()]
    assert labels[2] is None
    for image, (order, label) in enumerate(zip(orders, labels, strict=True)):
        expected = generator_logits(tensors, ids[image][order], label, order)
        torch.testing.assert_close(found[image], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("context")
def test_likelihood_is_the_sum_over_the_released_logits(tmp_path):
    """Each image in the order that its number draws."""
    tensors, labels = released(), [1, 4, -1]
    run = opened(tmp_path, tensors)
    images = HeldOutIds(IDS, SIDE**2, labels)
    result = measure_likelihood("randar", 7, run.inference, run.objective, images)
    nats = 0.0
    orders = run.objective.schedule.at(None).draw(torch.arange(3)).order.tolist()
    assert orders[0] != orders[1]
    for ids, label, order in zip(images.ids, labels, orders, strict=True):
        logits = generator_logits(tensors, ids[order], None if label < 0 else label, order)
        nats -= sum(
            float(row.double().log_softmax(0)[i]) for row, i in zip(logits, ids[order], strict=True)
        )
    assert result.nats_per_image == pytest.approx(nats / 3, rel=1e-5)
    assert result.bits_per_dimension == pytest.approx(nats / 3 / 16 / math.log(2), rel=1e-5)
    assert (result.num_images, result.dimensions_per_image) == (3, SIDE**2)


@pytest.mark.usefixtures("context")
def test_sampling_reads_the_released_logits(tmp_path):
    """With cached keys, of which the class's are zeros: the likeliest id at every place."""
    tensors = released()
    run = opened(tmp_path, tensors)
    sampler = Sampler(run.inference, run.objective, tmp_path, {"temperature": 0})
    numbers, labels = torch.arange(2), torch.tensor([0, 3])
    *_, tokens = sampler.rounds(numbers, conditions={"labels": labels})
    for image, order in enumerate(sampler.order_of(numbers).tolist()):
        ids = tokens[image]
        logits = generator_logits(tensors, ids, int(labels[image]), order)
        assert ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("preset", "width", "layers", "inner"),
    [("l", 1024, 24, 2816), ("xl", 1280, 36, 3584), ("xxl", 1536, 48, 4096)],
)
def test_released_sizes_are_the_presets(monkeypatch, preset, width, layers, inner):
    """Names and shapes of the released networks, on the meta device."""
    tensors = on_meta(shapes(width, layers, inner, ids=16_384, classes=1000))
    monkeypatch.setattr(released_weights, "read_weights_file", lambda path, inside: tensors)
    found = randar.read_randar(argparse.Namespace(source=Path("a.safetensors"), tokenizer=None))
    assert_is_preset(found, f"randar/{preset}.yaml", tokenizer=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output.weight": None}, "the weights have no output.weight, which RandAR has"),
        ({"layers.1.ffn_norm.weight": None}, "the weights have no layers.1.ffn_norm.weight"),
        ({"mask": torch.zeros(1)}, "mask does not belong to RandAR"),
        (
            {"layers.1.feed_forward.w3.weight": torch.zeros(95, WIDTH)},
            r"w3.weight has shape \[95, 128\]; the other tensors imply \[96, 128\]",
        ),
        ({"output.weight": torch.zeros(IDS, 96)}, "a width of 96 and 5 classes are no sizes"),
    ],
)
def test_what_is_no_released_network_is_named(tmp_path, capsys, change, message):
    tensors = {n: t for n, t in (released() | change).items() if t is not None}
    code, run = imported(tmp_path, tensors)
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not run.exists()
