"""Perceptual distance and LPIPS against a layer-by-layer reference in PyTorch."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megavis.config.errors import UserError
from megavis.model.autoencoder_losses import PerceptualDistance

pytestmark = pytest.mark.once

WIDTHS = {"vgg": (64, 128, 256, 512, 512), "alex": (64, 192, 384, 256, 256)}
ENDS = {"vgg": (3, 8, 15, 22, 29), "alex": (1, 4, 7, 9, 11)}
"""Indices of the ReLU layers whose features are compared."""


def vgg():
    layers, width = [], 3
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU()]
            width = outputs
        layers.append(nn.MaxPool2d(2))
    return layers


def alex():
    return [
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        *(nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2)),
        *(nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1)),
        *(nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1)),
        *(nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
    ]


@pytest.fixture(params=["vgg", "alex"])
def network(request, tmp_path):
    """Return the network's name, random layers, linear weights, and the folder of their files."""
    torch.manual_seed(0)
    name = request.param
    features = nn.Sequential(*{"vgg": vgg, "alex": alex}[name]())
    weights = {f"features.{n}": t for n, t in features.state_dict().items()}
    save_file(weights, tmp_path / "backbone.safetensors")
    linear = [torch.rand(1, width, 1, 1) for width in WIDTHS[name]]
    torch.save({f"lin{n}.model.1.weight": w for n, w in enumerate(linear)}, tmp_path / "lin.pth")
    return name, features, linear, tmp_path


@torch.no_grad()
def plainly(name, features, linear, first, second):
    """Evaluate equation 1 position by position."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pair = [((x - mean[:, None, None]) / std[:, None, None])[None] for x in (first, second)]
    distance, level = 0.0, 0
    for number, layer in enumerate(features):
        pair = [layer(x) for x in pair]
        if number not in ENDS[name]:
            continue
        one, two = (x[0].flatten(1).t() for x in pair)
        weights = linear[level].flatten()
        terms = []
        for here, there in zip(one, two, strict=True):
            units = [x / x.norm() if x.norm() > 0 else x for x in (here, there)]
            terms.append(float((weights * (units[0] - units[1]) ** 2).sum()))
        distance += sum(terms) / len(terms)
        level += 1
    return distance


def test_lpips_matches_equation_1(network):
    name, features, linear, folder = network
    first, second = torch.rand(2, 2, 3, 40, 33).unbind(0)
    distance = PerceptualDistance.load(folder / "backbone.safetensors", folder / "lin.pth")
    expected = [plainly(name, features, linear, *pair) for pair in zip(first, second, strict=True)]
    assert distance(first, second).tolist() == pytest.approx(expected, rel=1e-4)
    assert distance(first, first).tolist() == [0.0, 0.0]


def test_linear_weights_default_to_one(network):
    name, features, linear, folder = network
    first, second = torch.rand(2, 3, 32, 32).unbind(0)
    ones = [torch.ones_like(w) for w in linear]
    found = PerceptualDistance.load(folder / "backbone.safetensors")(first[None], second[None])
    expected = plainly(name, features, ones, first, second)
    assert found.item() == pytest.approx(expected, rel=1e-4)


def test_constant_images_have_no_backward_pass(network):
    """Two forward passes and the gradient of one image, as the weights are constant too."""
    distance = PerceptualDistance.load(network[-1] / "backbone.safetensors")
    first, second = torch.rand(2, 1, 3, 32, 32).unbind(0)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        distance(first, second)
    first.requires_grad_()
    with FlopCounterMode(display=False) as both:
        distance(first, second).sum().backward()
    assert both.get_total_flops() == pytest.approx(1.5 * forward.get_total_flops())


def test_linear_weights_of_another_network_raise(network):
    name, *_, folder = network
    other = WIDTHS["alex" if name == "vgg" else "vgg"]
    weights = {f"lin{n}.model.1.weight": torch.ones(1, w, 1, 1) for n, w in enumerate(other)}
    save_file(weights, folder / "other.safetensors")
    with pytest.raises(UserError, match=r"lin1.* of shape .*; the network needs"):
        PerceptualDistance.load(folder / "backbone.safetensors", folder / "other.safetensors")


def test_images_smaller_than_the_receptive_field_raise(network):
    distance = PerceptualDistance.load(network[-1] / "backbone.safetensors")
    images = torch.rand(1, 3, 15, 64)
    with pytest.raises(UserError, match="pixels on each side, not 15×64"):
        distance(images, images)


def test_files_without_network_weights_raise(tmp_path):
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"no features\.0\.weight"):
        PerceptualDistance.load(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="not a file of network weights"):
        PerceptualDistance.load(tmp_path / "missing.pth")
