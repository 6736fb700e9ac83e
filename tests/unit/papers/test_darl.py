"""DARL: visibility in every order, decoders against plain formulas, noise in its limits."""

import pytest
import torch
import torch.nn.functional as F
from small_batches import batch_of, photographs, run_layers
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.densities.diffusion import with_gamma
from megavis.model.layer_state import from_bits

CONFIG = tiny("{name: darl, patch_size: 4}", model=VIT)
SIDE, PATCHES, WIDTH = 16, 16, 48
DIFFUSION = ("objective.loss=diffusion", "objective.noise_a=1")


@pytest.fixture
def build(build_paper):
    """Build a DARL of sixteen patches."""
    return lambda *words: build_paper(CONFIG, *words, std=0.3)


# Visibility.

ORDERS = {
    "raster": (),
    "nested": ("objective.order=nested_raster",),
    "round robin": ("objective.order=round_robin",),
    "random": ("objective.order=random", "objective.two_streams=true"),
    "raster in two streams": ("objective.two_streams=true",),
}


@pytest.mark.parametrize("positions", ["none", "learned", "sincos", "rope_1d", "rope_2d"])
@pytest.mark.parametrize("order", list(ORDERS))
def test_predictions_are_causal(build, order, positions):
    objective, inference = build(*ORDERS[order], f"model.positions={positions}")
    tokens, *rest = objective.sequence(batch_of(photographs(2, SIDE))).inputs
    tokens.requires_grad_()
    predictions = run_layers(inference.layers.modules, (tokens, *rest))
    for place in range(PATCHES):
        weights = torch.randn(WIDTH, generator=torch.Generator().manual_seed(place))
        (gradient,) = torch.autograd.grad(
            (predictions[:, place] * weights).sum(), tokens, retain_graph=True
        )
        moved = gradient.abs().sum(-1) > 0
        # The last patch is a target only, not an input.
        expected = torch.arange(PATCHES - 1) < place
        assert torch.equal(moved, expected.expand(2, -1)), place


@pytest.mark.parametrize("decoder", ["linear", "mlp", "transformer"])
def test_noisy_patch_affects_its_own_position_only(build, decoder):
    objective, inference = build(*DIFFUSION, f"objective.decoder={decoder}")
    *rest, noisy = objective.sequence(batch_of(photographs(2, SIDE))).inputs
    before = inference.predictions((*rest, noisy))
    noisy[:, 5] += 0.5
    moved = (inference.predictions((*rest, noisy)) != before).any(-1)
    assert torch.equal(moved, (torch.arange(PATCHES) == 5).expand(2, -1))


@pytest.mark.parametrize("order", list(ORDERS))
def test_inputs_and_targets_follow_the_order(build, order):
    objective, inference = build(*ORDERS[order], *DIFFUSION)
    images = photographs(2, SIDE)
    inputs = objective.sequence(batch_of(images)).inputs
    tokens, places, noisy = *inputs[:2], inputs[-1]
    (targets,) = objective.sequence(batch_of(images)).targets
    patches = objective.reads.of(images)
    orders = objective.schedule.draw(torch.arange(2)).order.expand(2, -1)
    for image in range(2):
        assert places.expand(2, -1)[image].tolist() == orders[image, :-1].tolist()
        for place, cell in enumerate(orders[image].tolist()):
            assert torch.equal(targets[image, place], patches[image, cell])
            if place + 1 < PATCHES:
                assert torch.equal(tokens[image, place], patches[image, cell])
    if objective.paper.two_streams:
        assert torch.equal(inputs[3], orders)
    assert noisy.shape == (2, PATCHES, WIDTH + 1)
    carried = inference.layers.modules[0](inputs)
    names = objective.carried_names
    assert torch.equal(from_bits(carried[1 + names.index("noisy")]), noisy)
    coordinates = carried[1 + names.index("coordinates")][0].tolist()
    cells = [[0, -1], *([cell // 4, cell % 4] for cell in orders[0].tolist())]
    queries = cells[1:] if objective.paper.two_streams else []
    assert coordinates == [*cells[:-1], *queries]


# Decoders.


def plain_block(block, pair):
    """Apply a Transformer block to a pair `[2, h]` with plain tensor operations, head by head."""
    attention, size = block.self_attention, 8
    norm = block.input_layernorm
    x = F.layer_norm(pair, (16,), norm.weight, norm.bias, 1e-6)
    joined = x @ attention.linear_qkv.weight.t() + attention.linear_qkv.bias
    heads = []
    for head in range(2):
        q, k, v = joined[:, 3 * head * size : 3 * (head + 1) * size].split(size, dim=1)
        heads.append((q @ k.t() / size**0.5).softmax(-1) @ v)
    out = attention.linear_proj
    pair = pair + torch.cat(heads, 1) @ out.weight.t() + out.bias
    norm, mlp = block.pre_mlp_layernorm, block.mlp
    x = F.layer_norm(pair, (16,), norm.weight, norm.bias, 1e-6)
    x = F.gelu(x @ mlp.linear_fc1.weight.t() + mlp.linear_fc1.bias)
    return pair + x @ mlp.linear_fc2.weight.t() + mlp.linear_fc2.bias


def embedded(head, noisy, gamma):
    """Embed a noisy patch with γ as the fourth channel of each pixel (section 4.1)."""
    pixels = [[*pixel.tolist(), float(gamma)] for pixel in noisy.view(-1, 3)]
    return torch.tensor(pixels).flatten() @ head.noisy.weight.t() + head.noisy.bias


def test_pairs_of_the_decoder_avoid_sdpa(build, monkeypatch):
    """Flash attention would pad each pair to a block of queries: only the backbone uses SDPA."""
    objective, inference = build(*DIFFUSION, "objective.decoder=transformer")
    lengths, plain = set(), F.scaled_dot_product_attention

    def recording(query, key, value, **options):
        lengths.add(key.shape[2])
        return plain(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    run_layers(inference.layers.modules, objective.sequence(batch_of(photographs(2, SIDE))).inputs)
    assert lengths == {PATCHES}


@pytest.mark.parametrize("decoder", ["linear", "mlp", "transformer"])
def test_decoders_match_plain_formulas(build, decoder):
    objective, inference = build(
        *DIFFUSION,
        f"objective.decoder={decoder}",
        "objective.decoder_layers=2",
        "objective.condition_on_gamma=true",
    )
    head = inference.layers.modules[-1]
    generator = torch.Generator().manual_seed(2)
    output, noisy = torch.randn(1, 3, 16, generator=generator), torch.randn(1, 3, WIDTH)
    gamma = torch.rand(1, 3, 1)
    with torch.no_grad():
        decoded = head.decode(output, with_gamma(noisy, gamma))
        for place in range(3):
            z, patch = output[0, place], embedded(head, noisy[0, place], gamma[0, place])
            x = z + patch
            for layer in head.decoder.layers:
                if decoder == "mlp":
                    inner = F.layer_norm(x, (16,), layer.norm.weight, layer.norm.bias, 1e-6)
                    fc1, fc2 = layer.mlp.linear_fc1, layer.mlp.linear_fc2
                    x = x + fc2.bias + F.gelu(inner @ fc1.weight.t() + fc1.bias) @ fc2.weight.t()
            if decoder == "transformer":
                pair = torch.stack([z, patch])
                for layer in head.decoder.layers:
                    pair = plain_block(layer, pair)
                x = pair[1]
            if decoder != "linear":
                norm = head.decoder.norm
                x = F.layer_norm(x, (16,), norm.weight, norm.bias, 1e-6)
            linear = head.decoder.linear
            torch.testing.assert_close(
                decoded[0, place], x @ linear.weight.t() + linear.bias, rtol=1e-4, atol=1e-4
            )


# Noise.


def test_noise_is_a_function_of_seed_and_sample(build):
    objective, _ = build(*DIFFUSION)
    images = photographs(4, SIDE)
    whole = objective.sequence(batch_of(images)).inputs[-1]
    part = objective.sequence(batch_of(images[2:], first=2)).inputs[-1]
    assert torch.equal(whole[2:], part)
    assert not torch.equal(objective.sequence(batch_of(images, first=9)).inputs[-1][0], whole[0])


@pytest.mark.parametrize("predicts", ["clean", "noise"])
def test_noisy_patches_match_targets(build, predicts):
    objective, _ = build(*DIFFUSION, f"objective.predicts={predicts}")
    sequence = objective.sequence(batch_of(photographs(2, SIDE)))
    noise, gamma = objective.density.draw_noise(torch.arange(2), PATCHES)
    clean = objective.reads.of(photographs(2, SIDE))
    packed = sequence.inputs[-1]
    assert torch.equal(packed[..., -1:], gamma)
    torch.testing.assert_close(packed[..., :-1], gamma.sqrt() * clean + (1 - gamma).sqrt() * noise)
    assert torch.equal(sequence.targets[0], noise if predicts == "noise" else clean)
    assert gamma.unique().numel() == 2 * PATCHES, "γ is drawn per patch"


def test_pure_noise_has_the_squared_error_solution(build):
    """With γ = 0 the noisy patch carries no information, so the optimum is that of squared error.

    The decoders are linear, so the optima are least-squares solutions on the backbone's outputs,
    with and without the noisy patch appended.
    """
    objective, inference = build(*DIFFUSION, "objective.decoder=linear")
    images = photographs(400, SIDE)
    inputs = objective.inputs_from(images, gamma=0.0)
    (targets,) = objective.sequence(batch_of(images)).targets
    noisy = inputs[-1].flatten(0, 1)
    with torch.no_grad():
        *before, head = inference.layers.modules
        output = head.outputs(run_layers(before, inputs)).flatten(0, 1)
    one = torch.ones(len(output), 1)
    plain, extended = torch.cat([output, one], 1), torch.cat([output, one, noisy[:, :-1]], 1)
    goal = targets.flatten(0, 1)
    of_mse = torch.linalg.lstsq(plain, goal, driver="gelsd").solution
    of_diffusion = torch.linalg.lstsq(extended, goal, driver="gelsd").solution
    error = (plain @ of_mse - goal).square().mean()
    # 48 uninformative features on 6400 rows explain about 48 / 6400 of the error by chance.
    assert 0.98 < (extended @ of_diffusion - goal).square().mean() / error <= 1.0
    assert of_diffusion[-WIDTH:].abs().max() < 0.08


def test_features_read_every_patch(build):
    objective, inference = build(*DIFFUSION, *ORDERS["random"])
    batch = batch_of(photographs(2, SIDE))
    tokens, places, _, asked, *_ = objective.feature_inputs(batch)
    assert places[0].tolist() == [*range(PATCHES)]
    assert torch.equal(tokens, objective.reads.of(batch.inputs))
    assert asked.shape == (2, 0)
    assert inference.features(objective.feature_inputs(batch)).shape == (3, 2, 16)


# Keys.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.patch_size=5"], "5 does not divide data.image_size 16"),
        (["objective.order=nested_raster", "objective.order_block=3"], "3 does not divide a grid"),
        (["objective.order=random"], "objective.two_streams: content does not encode"),
        (["objective.decoder=transformer"], "objective.decoder: transformer pairs"),
        ([*DIFFUSION, "objective.normalize_targets=true"], "belongs to loss mse"),
        (["model.num_attention_heads=8"], "needs a head width divisible by 4, not 2"),
        (
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=true",
                "data.image_size=12",
            ],
            "9 rows are not divisible by tensor_model_parallel_size 2",
        ),
        (
            [
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=true",
                "finetune={num_classes: 3}",
                "data.validation=shards/validation",
                "training.validate_every=1",
            ],
            "17 rows are not divisible by tensor_model_parallel_size 2",
        ),
    ],
)
def test_incompatible_keys(build, words, message):
    with pytest.raises(UserError, match=message):
        build(*words)
