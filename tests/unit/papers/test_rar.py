"""RAR against the equations of its released code in plain torch, on the same random weights.

No package ships the generator, so it is written here from its equations, for whole sequences.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from released_tensors import copy_named
from small_batches import run_layers
from tiny import VIT, tiny

from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch
from megavis.model.attention import join_heads
from megavis.sampling.sampler import Sampler

pytestmark = pytest.mark.once

WIDTH, HEADS, LAYERS, CLASSES, IDS, TOKENS = 32, 4, 3, 5, 12, 16
CONFIG = tiny(
    f"{{name: rar, patch_size: 4, vocabulary_size: {IDS}, num_classes: {CLASSES}}}",
    model={
        **VIT,
        "qk_norm": True,
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
    },
    training={"steps": 100, "batch_size": 8},
)


@pytest.fixture
def make(build_paper):
    """Build a model of sixteen ids."""
    return lambda *words: build_paper(CONFIG, *words, std=0.2)


# The released code, from its equations.


def released():
    """Return random tensors under the names of the released code."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return 0.3 * torch.randn(*shape, generator=generator)

    def linear(name, inputs, outputs):
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    shapes = {
        "cls_token": (WIDTH,),
        "embeddings": (IDS + 1 + CLASSES + 1, WIDTH),
        "pos_embed": (TOKENS + 2, WIDTH),
        "target_aware_pos_embed": (TOKENS + 2, WIDTH),
        "timesteps_embeddings": (TOKENS + 2, WIDTH),
        **linear("adaln_before_head.adaLN_modulation.1", WIDTH, 2 * WIDTH),
        **linear("lm_head", WIDTH, IDS),
    }
    for i in range(LAYERS):
        block, size = f"blocks.{i}", WIDTH // HEADS
        norms = {"norm1": WIDTH, "norm2": WIDTH, "attn.q_norm": size, "attn.k_norm": size}
        for name, width in norms.items():
            shapes |= {f"{block}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        shapes |= linear(f"{block}.attn.qkv", WIDTH, 3 * WIDTH)
        shapes |= linear(f"{block}.attn.proj", WIDTH, WIDTH)
        shapes |= linear(f"{block}.mlp.fc1", WIDTH, 4 * WIDTH)
        shapes |= linear(f"{block}.mlp.fc2", 4 * WIDTH, WIDTH)
        shapes |= linear(f"{block}.adaLN_modulation.1", WIDTH, 6 * WIDTH)
    return {name: random(*shape) for name, shape in shapes.items()}


def mapped(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def normed(tensors, name, x):
    given = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return F.layer_norm(x, x.shape[-1:], *given, 1e-6)


def attended(tensors, block, x):
    """Return causal attention of the rows `[m, h]` of one image."""
    stacked = mapped(tensors, f"{block}.attn.qkv", x).unflatten(-1, (3, HEADS, -1))
    query, key, value = stacked.permute(1, 2, 0, 3)
    query = normed(tensors, f"{block}.attn.q_norm", query)
    key = normed(tensors, f"{block}.attn.k_norm", key)
    scores = query @ key.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
    for row in range(len(x)):
        scores[:, row, row + 1 :] = -math.inf
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    return mapped(tensors, f"{block}.attn.proj", mixed)


def generator_logits(tensors, ids, label, order):
    """Return logits `[len(ids) + 1, v]` of the next id of one image.

    Args:
        ids: in the order of generation.
        label: the class; None for no class.
        order: the place of each id.
    """
    row = IDS + 1 + (CLASSES if label is None else label)
    condition = tensors["embeddings"][row]
    rows = [tensors["cls_token"], condition, *(tensors["embeddings"][i] for i in ids)]
    places = [0, 1, *(2 + place for place in order)]
    x = torch.stack([r + tensors["pos_embed"][p] for r, p in zip(rows, places, strict=False)])
    for number, place in zip(range(1, len(rows)), order, strict=False):
        x[number] += tensors["target_aware_pos_embed"][2 + place]
    vectors = condition + tensors["timesteps_embeddings"][: len(rows)]
    for i in range(LAYERS):
        block = f"blocks.{i}"
        parts = mapped(tensors, f"{block}.adaLN_modulation.1", F.silu(vectors)).chunk(6, -1)
        y = normed(tensors, f"{block}.norm1", x) * (1 + parts[1]) + parts[0]
        x = x + parts[2] * attended(tensors, block, y)
        y = normed(tensors, f"{block}.norm2", x) * (1 + parts[4]) + parts[3]
        y = mapped(tensors, f"{block}.mlp.fc2", F.gelu(mapped(tensors, f"{block}.mlp.fc1", y)))
        x = x + parts[5] * y
    name = "adaln_before_head.adaLN_modulation.1"
    scale, shift = mapped(tensors, name, F.silu(vectors)).chunk(2, -1)
    x = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
    return mapped(tensors, "lm_head", x)[1:]


def ours(tensors):
    """Return the same weights under our names, for norms before the head without gain and bias.

    What the released code adds to the class as a token is part of the class's vector here, and
    taken away from the vectors of rows.
    """
    first = tensors["pos_embed"][1]
    named = {
        "embedding.content.weight": tensors["embeddings"][:IDS],
        "embedding.start.weight": tensors["embeddings"][IDS + 1 :] + first,
        "embedding.sink": tensors["cls_token"] + tensors["pos_embed"][0],
        "embedding.row_vectors": tensors["timesteps_embeddings"][: TOKENS + 1] - first,
        "embedding.positions.weight": tensors["pos_embed"][2:],
        "embedding.asked_positions.weight": tensors["target_aware_pos_embed"][2:],
        "head.norm.weight": torch.ones(WIDTH),
        "head.norm.bias": torch.zeros(WIDTH),
        "head.linear.weight": tensors["lm_head.weight"],
        "head.linear.bias": tensors["lm_head.bias"],
    }
    for kind in ("weight", "bias"):
        scale, shift = tensors[f"adaln_before_head.adaLN_modulation.1.{kind}"].chunk(2)
        named[f"head.modulation.linear.{kind}"] = torch.cat([shift, scale])
    names = {
        "input_layernorm": "norm1",
        "pre_mlp_layernorm": "norm2",
        "self_attention.query_norm": "attn.q_norm",
        "self_attention.key_norm": "attn.k_norm",
        "self_attention.linear_proj": "attn.proj",
        "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2",
        "modulation.linear": "adaLN_modulation.1",
    }
    for i in range(LAYERS):
        for kind in ("weight", "bias"):
            for own, theirs in names.items():
                named[f"blocks.{i}.{own}.{kind}"] = tensors[f"blocks.{i}.{theirs}.{kind}"]
            joined = join_heads(*tensors[f"blocks.{i}.attn.qkv.{kind}"].chunk(3), HEADS)
            named[f"blocks.{i}.self_attention.linear_qkv.{kind}"] = joined
    return named


# Equal to it.


def batch(step, count=4):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(IDS, (count, TOKENS), generator=generator)
    labels = torch.tensor([0, 4, -1, 2])[:count]
    return Batch(ids, labels, torch.arange(7, 7 + count), step)


@pytest.mark.parametrize("step", [0, 62, 99, None])
def test_logits_and_loss_equal_the_released_generator(make, step):
    """In random, mixed and raster orders; step 62 is in the middle of the annealing."""
    tensors = released()
    objective, inference = make("objective.label_dropout=0.5")
    copy_named(inference, ours(tensors))
    samples = batch(step)
    sequence = objective.training_sequence(samples)
    predictions = run_layers(inference.layers.modules, sequence.inputs)
    orders = objective.schedule.at(step).draw(samples.sample_index).order.tolist()
    is_raster = [order == list(range(TOKENS)) for order in orders]
    assert any(is_raster) == (step != 0)
    assert all(is_raster) == (step in (99, None))

    known = sequence.inputs[4].tolist()
    assert CLASSES in known
    losses = []
    logits = objective.outputs(predictions)
    for image, order in enumerate(orders):
        ids = samples.inputs[image][order]
        label = None if known[image] == CLASSES else known[image]
        assert label in (None, int(samples.labels[image]))
        expected = generator_logits(tensors, ids, label, order)[:-1]
        torch.testing.assert_close(logits[image], expected, rtol=1e-4, atol=1e-4)
        losses.append(F.cross_entropy(expected, ids))
    loss = objective.loss(predictions, sequence.targets)
    torch.testing.assert_close(loss, sum(losses) / 4, rtol=1e-4, atol=0)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("scale", "power"), [(1.0, None), (4.0, None), (7.0, 1.5), (3.0, 0.0)])
def test_samples_equal_the_released_loop(make, tmp_path, cached, scale, power):
    """Likeliest ids, step by step, with guidance that grows with a power of the steps."""
    tensors = released()
    objective, inference = make()
    copy_named(inference, ours(tensors))
    options = {"temperature": 0.0, "guidance": scale - 1, "guidance_power": power}
    sampler = Sampler(inference, objective, tmp_path, options)
    labels = torch.tensor([3, 1])
    known = {"labels": labels}
    found = sampler.tokens(torch.arange(2), conditions=known, cached=cached)
    raster = list(range(TOKENS))
    for image, label in enumerate(labels.tolist()):
        ids = []
        for step in range(TOKENS):
            share = (1 - math.cos((step / TOKENS) ** (power or 0.0) * math.pi)) / 2
            now = scale if power is None else (scale - 1) * share + 1
            given, free = (
                generator_logits(tensors, ids, each, raster)[-1] for each in (label, None)
            )
            ids.append(int((free + now * (given - free)).argmax()))
        assert found[image].tolist() == ids


def test_at_the_start_blocks_are_the_identity(make):
    """The maps of adaLN-Zero start at zero, so that no branch adds anything."""
    objective, _ = make()
    plans = {plan.name: plan for plan in objective.layer_plans()}
    block = plans["blocks.1"].build()
    state = torch.randn(TOKENS + 1, 2, WIDTH), torch.randn(TOKENS + 1, 2, WIDTH)
    hidden, vectors = block(state)
    assert torch.equal(hidden, state[0])
    assert torch.equal(vectors, state[1])


# Keys.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective.patch_size=5"], "5 does not divide data.image_size 16"),
        (["objective.randomness=[0.75,0.5]"], r"objective.randomness: \[0.75, 0.5\] ends before"),
        (["objective.randomness=[0.75,1.5]"], "objective.randomness"),
        (["model.positions=rope_2d"], "rope_2d cannot add two places to a row; set it to learned"),
    ],
)
def test_incompatible_keys(make, words, message):
    with pytest.raises(UserError, match=message):
        make(*words)


def test_runs_of_ids_without_a_tokenizer_are_accepted(make):
    objective, _ = make("objective.class_token=false", "objective.adaptive_norms=none")
    assert objective.num_skipped == 0
    assert objective.config.objective.cannot_generate(objective.config) is None
