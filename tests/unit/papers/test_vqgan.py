"""Training a VQGAN: loss terms against plain loops, gradients, revival of dead entries."""

import pytest
import torch
from small_batches import batch_of, photographs
from small_vqgan import write_config

from megavis.config.load import load_config
from megavis.model.stack import LayerStack
from megavis.papers import OBJECTIVES

pytestmark = pytest.mark.once


@pytest.fixture
def small(tmp_path, context):
    """The objective, its layers and a batch of random images."""
    config = load_config(write_config(tmp_path)).config
    objective = OBJECTIVES["vqgan"](config, context)
    stack = LayerStack(objective.layer_plans(), objective.loss)
    return objective, stack, batch_of(photographs(3, 16))


def test_terms_match_definitions(small):
    objective, stack, batch = small
    (pixels,) = objective.sequence(batch).inputs
    network = stack.layers[0].network
    with torch.no_grad():
        terms = objective.terms(stack.layers[1](stack.layers[0]((pixels,))))
    vectors = network.vectors(pixels).detach().permute(0, 2, 3, 1).flatten(0, 2)
    entries, choices = network.quantize.embedding.weight, []
    distance = 0.0
    for vector in vectors:
        away = [(entry - vector).square().sum() for entry in entries]
        choices.append(int(torch.stack(away).argmin()))
        distance = distance + away[choices[-1]] / (len(vectors) * entries.shape[1])
    assert terms["codebook"] == pytest.approx(float(distance), rel=1e-4)
    assert terms["commitment"] == pytest.approx(float(distance), rel=1e-4)
    shares = [choices.count(k) / len(choices) for k in range(12)]
    assert terms["codebook_use"] == pytest.approx(sum(share > 0 for share in shares) / 12)
    entropy = -sum(share * torch.tensor(share).log() for share in shares if share)
    assert terms["codebook_perplexity"] == pytest.approx(float(entropy.exp()), rel=1e-5)


def test_codebook_and_commitment_gradients(small):
    objective, stack, batch = small
    state = stack.layers[0](objective.sequence(batch).inputs)
    encoder = stack.layers[0].network.encoder.conv_in.weight
    book = stack.layers[0].network.quantize.embedding.weight
    codebook, commitment, revival = state[2:5]

    def reaches(term, weight):
        (gradient,) = torch.autograd.grad(term, weight, retain_graph=True, allow_unused=True)
        return gradient is not None

    assert (reaches(codebook, encoder), reaches(codebook, book)) == (False, True)
    assert (reaches(commitment, encoder), reaches(commitment, book)) == (True, False)
    assert (reaches(revival, encoder), reaches(revival, book)) == (False, True)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_dead_entries_are_revived(small, weight):
    """Entries far from all vectors are never chosen, so only the revival term moves them."""
    objective, stack, batch = small
    network = stack.layers[0].network
    inputs = objective.sequence(batch).inputs
    with torch.no_grad():
        network.quantize.embedding.weight[1:] += 100.0
    optimizer = torch.optim.Adam(network.quantize.parameters(), lr=1.0)
    for _ in range(300):
        codebook, _, revival = stack.layers[0](inputs)[2:5]
        optimizer.zero_grad()
        (codebook + weight * revival).backward()
        optimizer.step()
    chosen = len(stack.layers[0](inputs)[5].unique())
    assert chosen == 1 if weight == 0.0 else chosen > 6
