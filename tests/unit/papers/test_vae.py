"""Training a VAE: losses against plain arithmetic, gradients, optimizer options."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_batches import batch_of, photographs, run_layers
from vae_config import write_config

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.data.loading.loader import Batch
from megavis.model.autoencoder_losses import Discriminator, squared_slope
from megavis.model.inference import Inference
from megavis.model.stack import LayerStack, LocalLayers
from megavis.papers import OBJECTIVES
from megavis.papers.vae.posterior_figure import applies, decoded
from megavis.parallel.random import normal

pytestmark = pytest.mark.once


@pytest.fixture
def small(tmp_path, context):
    """The objective, its layers and a batch of random images."""
    config = load_config(write_config(tmp_path)).config
    objective = OBJECTIVES["vae"](config, context)
    stack = LayerStack(objective.layer_plans(), objective.loss)
    return objective, stack, batch_of(photographs(3, 16))


def test_posterior_samples_are_decoded(small, context):
    """GIVT, Figure 12: images decoded from mean + scale · noise, with new noise per draw."""
    objective, _, batch = small
    plans = objective.layer_plans()
    layers = LocalLayers(plans, list(LayerStack(plans, objective.loss).layers))
    inference = Inference(layers, context)
    mean, draws = decoded(inference, objective, batch, draws=2)
    network = layers.modules[0].network.eval()
    pixels = batch.inputs.permute(0, 3, 1, 2) / 255.0
    with torch.no_grad():
        posterior = network.posterior(pixels)
        for number, made in enumerate((mean, *draws)):
            noise = torch.zeros_like(posterior.mean)
            if number:
                index = batch.sample_index + (number - 1) * 3
                noise = normal(index, noise[0].numel(), seed=0, purpose="posterior")
                noise = noise.view_as(posterior.mean)
            image = network.decoder(posterior.mean + posterior.scale * noise)
            expected = (image.clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
            assert (made.int() - expected).abs().max() <= 1
    assert not torch.equal(draws[0], draws[1])
    assert applies(objective)


def test_loss_is_the_weighted_sum_of_its_terms(small):
    objective, stack, batch = small
    sequence = objective.sequence(batch)
    pixels, made, mean, log_variance, for_generator, real, fake, slope = run_layers(
        stack.layers, sequence.inputs
    )
    expected = F.mse_loss(made, batch.inputs.permute(0, 3, 1, 2) / 255.0)
    kl = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance)
    expected = expected + 1e-4 * kl.sum() / 3
    expected = expected + 0.1 * -torch.log(torch.sigmoid(for_generator)).mean()
    expected = expected - torch.log(torch.sigmoid(real)).mean()
    expected = expected - torch.log(1 - torch.sigmoid(fake)).mean() + 5.0 * slope.mean()
    torch.testing.assert_close(stack(sequence.inputs, ()), expected)


def test_generator_and_discriminator_losses_are_separate(small):
    objective, stack, batch = small
    inputs = objective.sequence(batch).inputs
    stack(inputs, ()).backward()
    together = {n: p.grad.clone() for n, p in stack.named_parameters()}

    def gradients(loss_of):
        stack.zero_grad()
        loss_of(objective.terms(run_layers(stack.layers, inputs))).backward()
        return {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}

    generator = gradients(lambda m: m["squared_error"] + 1e-4 * m["kl"] + 0.1 * m["adversarial"])
    discriminator = gradients(lambda m: m["discriminator"] + 5.0 * m["squared_slope"])
    assert generator.keys().isdisjoint(discriminator)
    assert generator.keys() | discriminator.keys() == together.keys()
    for name, gradient in {**generator, **discriminator}.items():
        torch.testing.assert_close(gradient, together[name], msg=name)


def test_perceptual_distance_treats_images_as_constant(tmp_path, context):
    """Also on a pipeline stage, which receives them as a tensor that requires a gradient."""
    words = ["objective.perceptual_weight=0.1", "objective.perceptual_weights=vgg.pth"]
    objective = OBJECTIVES["vae"](load_config(write_config(tmp_path), words).config, context)
    needs = []

    def distance(first, second):
        needs.append((first.requires_grad, second.requires_grad))
        return (first - second).square().mean((1, 2, 3))

    vars(objective)["_perceptual"] = distance
    received = torch.rand(8, 2, 3, 16, 16).requires_grad_().unbind(0)
    objective.loss(received, ())
    assert needs == [(True, False)]


@pytest.mark.parametrize(("adversarial", "counts"), [(0.1, False), (0, True)])
def test_utilization_is_not_computed_from_the_autoencoder_alone(
    tmp_path, context, adversarial, counts
):
    words = [f"objective.adversarial_weight={adversarial}", "objective.perceptual_weight=0"]
    objective = OBJECTIVES["vae"](load_config(write_config(tmp_path), words).config, context)
    assert objective.counts_whole_step == counts


def test_squared_slope_matches_finite_differences():
    torch.manual_seed(0)
    network = Discriminator(8, 4).double()
    pixels = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    steps = torch.eye(pixels.numel(), dtype=torch.float64).view(-1, 3, 8, 8) * 1e-6
    with torch.no_grad():
        slope = (network(pixels + steps) - network(pixels - steps)) / 2e-6
    found = squared_slope(network, pixels)
    torch.testing.assert_close(found.double()[0], slope.square().sum(), rtol=1e-4, atol=0)
    with torch.no_grad():  # as in validation
        alone = squared_slope(network, pixels)
    torch.testing.assert_close(alone, found.detach())
    found.sum().backward()
    assert network.conv_in.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["objective.perceptual_weight=0.1"], "objective.perceptual_weights"),
        (["objective.filters=40"], "objective.filters"),
        (["data.image_size=18"], "data.image_size"),
        (["parallel.tensor_model_parallel_size=2"], "parallel.tensor_model_parallel_size"),
        (["parallel.context_parallel_size=2"], "parallel.context_parallel_size"),
        (["parallel.zero_stage=3"], "parallel.zero_stage"),
    ],
)
def test_incompatible_keys(tmp_path, words, key):
    with pytest.raises(UserError, match=key):
        load_config(write_config(tmp_path), words)


def test_model_section_is_required(tmp_path):
    path = tmp_path / "no_model.yaml"
    path.write_text(
        "name: x\nobjective: {name: igpt}\ndata: {train: t, image_size: 8}\n"
        "optimizer: {learning_rate: 1e-3}\ntraining: {steps: 1, batch_size: 1}\n"
    )
    with pytest.raises(UserError, match="model"):
        load_config(path)


def test_discriminator_optimizer_options(small):
    from megavis.training.optimizer import build_optimizer

    objective, stack, _ = small
    optimizer = build_optimizer(stack.layers.parameters(), objective.config.optimizer)
    first, second = optimizer.param_groups
    assert len(first["params"]) == len(list(stack.layers[0].parameters()))
    assert (first["betas"], first["learning_rate_scale"]) == ((0.0, 0.99), 1.0)
    assert (second["betas"], second["learning_rate_scale"]) == ((0.5, 0.9), pytest.approx(2.0))


def test_posterior_noise_depends_on_the_sample_only(small):
    objective, _, batch = small
    _, noise = objective.sequence(batch).inputs
    assert noise.shape == (3, 4, 4, 4)
    last = Batch(batch.inputs[2:], batch.labels[2:], batch.sample_index[2:])
    assert torch.equal(objective.sequence(last).inputs[1], noise[2:])
    assert np.isfinite(objective.flops_per_image())
