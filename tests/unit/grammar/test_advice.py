"""The advice of refused compositions, followed literally until the config is accepted."""

import copy
import itertools
import random
import re

import pytest
import yaml
from compositions import config
from pydantic import BaseModel

from megavis.config.checks import check_config
from megavis.config.schema import RunConfig
from megavis.grammar.compose import ComposeConfig
from megavis.grammar.grammar import Words

pytestmark = pytest.mark.once

TOKENS = (
    {"kind": "colors", "vocabulary_size": 33},
    {"kind": "patches", "patch_size": 4},
    {"kind": "patches", "patch_size": 5},
    {"kind": "ids", "vocabulary_size": 12, "patch_size": 4, "tokenizer": "run"},
    {"kind": "ids", "vocabulary_size": 13, "patch_size": 8},
    {"kind": "latents", "channels": 4, "patch_size": 4},
    {"kind": "latents", "channels": 3, "patch_size": 4, "tokenizer": "run"},
    {"kind": "latents", "channels": 2, "patch_size": 4, "stacked": 3, "tokenizer_beta": 0.1},
    {"kind": "frames"},
)
CHOICES = {
    "reads": TOKENS,
    "predicts": (None, None, None, *TOKENS),
    "schedule": (
        *(
            {"kind": "one_by_one", "order": order, "prefix": prefix}
            for order in ("raster", "random")
            for prefix in (0, 3, 300, "drawn")
        ),
        {"kind": "one_by_one", "order": "round_robin", "order_block": 3},
        {"kind": "one_by_one", "anneal": [0.5, 0.75]},
        {"kind": "one_by_one", "anneal": [0.5, 0.25]},
        {"kind": "one_by_one", "order": "random", "anneal": [0.5, 0.75]},
        {"kind": "one_by_one", "order": "random", "drawn": "run", "anneal": [0, 1]},
        {"kind": "masked"},
        {"kind": "rounds"},
        {"kind": "rounds", "chosen": "order", "masking_deviation": 0.25},
        {"kind": "rounds", "chosen": "order", "least_masking": 0.999},
        {"kind": "groups", "num_groups": 3},
        {"kind": "groups", "num_groups": 300},
        {"kind": "groups", "length": "given"},
        {"kind": "groups", "boundaries": [4, 4]},
        {"kind": "groups", "length": "given", "boundaries": [2, 40]},
        {"kind": "one_by_one", "order": [1, 0]},
        {"kind": "context", "mask_ratio": 0.01},
        {"kind": "context", "mask_ratio": 0.5},
    ),
    "asks": (
        *({"kind": "shift", "place": place} for place in ("asked", "content", "both")),
        *({"kind": "shift", "place": place, "start": False} for place in ("asked", "content")),
        *(
            {"kind": "shift", "place": "both", "sink": True, "start": start}
            for start in (True, False)
        ),
        *({"kind": "shift", "place": place, "zero_start": True} for place in ("asked", "content")),
        {"kind": "mask"},
        {"kind": "mask", "norm": True},
        {"kind": "mask", "filler": "zero_token"},
        {"kind": "mask", "marks": True},
        {"kind": "query"},
        {"kind": "query", "start": False, "streams": "one"},
        {"kind": "instruct"},
        {"kind": "instruct", "zero_start": True},
        {"kind": "in_context"},
        {"kind": "in_context", "given_ratio": 0.5},
        *(
            {
                "kind": "visible",
                "decoder": {"num_layers": 1, "hidden_size": size, "num_attention_heads": 2},
            }
            for size in (6, 8)
        ),
    ),
    "density": (
        {"kind": "categorical"},
        {"kind": "squared_error"},
        {"kind": "squared_error", "normalize": True},
        {"kind": "squared_error", "decoder": "mlp"},
        {"kind": "squared_error", "decoder_width": 8, "decoder_positions": True},
        *(
            {"kind": "squared_error", "decoder": "mlp", "decoder_width": width}
            | {"decoder_positions": places}
            for width in (5, 8)
            for places in (False, True)
        ),
        {"kind": "gaussian_mixture"},
        {"kind": "correlated_gaussian"},
        {"kind": "diffusion"},
        *(
            {"kind": "diffusion", "decoder": decoder, "decoder_width": 5, "noise_steps": 500}
            | {"noise": noise, "learns_variance": True, "condition_on_gamma": True}
            | {"decoder_positions": "learned", "noises_per_token": 2}
            for decoder in ("linear", "mlp", "modulated_mlp")
            for noise in ("beta", "cosine")
        ),
        {"kind": "place"},
    ),
    "condition": (
        None,
        None,
        {"kind": "labels", "num_classes": 3},
        {"kind": "labels", "num_classes": 3, "count": 4},
        {"kind": "labels", "num_classes": 3, "modulation": "class"},
        {"kind": "labels", "num_classes": 3, "modulation": "class_and_row"},
        {"kind": "learned_tokens", "count": 2},
        {"kind": "learned_tokens", "count": 0},
        {"kind": "pooled_features", "tokenizer": "run", "feature_size": 4},
    ),
    "memory": (
        None,
        None,
        None,
        {"kind": "encoded_image", "num_layers": 1, "patch_size": 8},
        {"kind": "encoded_image", "num_layers": 1, "patch_size": 5, "hidden_size": 15},
    ),
    "transform": (
        None,
        None,
        {"kind": "adapter", "blocks": 1},
        {"kind": "adapter", "blocks": 1, "bottleneck": 2},
    ),
    "positions": (None, None, "none", "learned", "rope_2d", "sincos"),
    "data": ({"image_size": 16}, {"image_size": 16}, {"image_size": 0, "frames": [12, 5]}),
    "parallel": (
        {},
        {},
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
    ),
}
TREE = yaml.safe_load(config("{name: compose}")) | {"optimizer": {"learning_rate": 1e-2}}
KEY = r"(?:objective|model|data|parallel)(?:\.[a-z0-9_]+)+"
WORDS = ("null", "true", "false")
STEPS = 20


def drawn(numbers):
    """Return a config's tree, with one choice of each."""
    chosen = {name: copy.deepcopy(numbers.choice(kinds)) for name, kinds in CHOICES.items()}
    tree = copy.deepcopy(TREE)
    tree["objective"] |= {name: chosen[name] for name in Words.model_fields if name in chosen}
    tree["model"]["positions"] = chosen["positions"]
    tree["data"] = {"train": "shards", **chosen["data"]}
    tree["parallel"] |= chosen["parallel"]
    return tree


def checked(tree):
    """Return the config, and its faults."""
    objective = ComposeConfig.model_validate(tree["objective"])
    config = RunConfig.model_validate({**tree, "objective": objective})
    return config, list(check_config(config))


def exists(config, key):
    """Whether the schema of this config, with its kinds, has the key."""
    section, names = config, key.split(".")
    for name in names:
        if not isinstance(section, BaseModel) or name not in type(section).model_fields:
            return False
        section = getattr(section, name)
    return True


def advised(key, text):
    """Return the choices of a message, each a list of keys and values to set."""
    *_, advice = re.split(r"[;:,] (?:or )?(?=set |change )", text, maxsplit=1)
    if re.search(r"\bset ", advice) is None:
        return []
    advice = re.sub(r"^change .*?(?=set it to)", "", advice).removeprefix("set ")
    advice = advice.replace("it to ", f"{key} to ").replace("this to ", f"{key} to ")
    found = []
    for choice in re.split(rf",? or (?=(?:set )?{KEY} to )", advice):
        parts = [
            part.removeprefix("set ") for part in re.split(rf"(?:,| and) (?={KEY} to )", choice)
        ]
        pairs = [part.split(" to ", 1) for part in parts]
        values = [re.split(r", | or ", value) for _, value in pairs]
        found += [
            [(name, read(value)) for (name, _), value in zip(pairs, one, strict=True)]
            for one in itertools.product(*values)
            if "more" not in one and "less" not in one
        ]
    return found


def read(value):
    """Read a value of a message; words are YAML too, but its reader is slow."""
    return value if value.isidentifier() and value not in WORDS else yaml.safe_load(value)


def followed(tree, choice):
    """Return the tree after these keys were set; another kind takes none of the old one's keys."""
    tree = copy.deepcopy(tree)
    for key, value in choice:
        *sections, last = key.split(".")
        section = tree
        for name in sections:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
        if last == "kind" and section.get("kind") != value:
            kept = {name: section[name] for name in ("patch_size",) if name in section}
            section.clear()
            if sections[-1] in ("reads", "predicts") and value == "patches":
                section.update(kept)
        section[last] = value
    return tree


def follow(tree, numbers):
    """Follow a random choice of a random message until none is left; return all trees."""
    seen, choice = [], []
    while len(seen) <= STEPS:
        config, faults = checked(tree)
        for key, _ in choice:
            assert exists(config, key), (key, seen)
        if not faults:
            return [*seen, tree]
        assert tree not in seen, f"advice in a circle: {seen}"
        seen.append(tree)
        for key, text in faults:
            assert exists(config, key), (key, text, tree)
            assert advised(key, text), f"no choice: {key}: {text}"
        choice = numbers.choice(advised(*numbers.choice(faults)))
        tree = followed(tree, choice)
    raise AssertionError(f"no end: {seen}")


def test_advice_leads_to_an_accepted_config():
    numbers = random.Random(0)
    paths = [follow(drawn(numbers), numbers) for _ in range(150)]
    assert sum(len(path) > 1 for path in paths) > 100


PATCHES = {"kind": "patches", "patch_size": 4}
ORDER, RANDOM = {"kind": "one_by_one"}, {"kind": "one_by_one", "order": "random"}
SHIFT, ERROR = {"kind": "shift"}, {"kind": "squared_error"}
GROUPS = {"kind": "groups", "num_groups": 3}
IDS = {"kind": "ids", "vocabulary_size": 12, "patch_size": 4, "tokenizer": "run"}


@pytest.mark.parametrize(
    ("words", "sections"),
    [
        # Kinds that others rule out: rounds by confidence, places, a second decoder.
        ({"asks": {"kind": "visible"}}, {}),
        ({"asks": {"kind": "in_context"}}, {}),
        ({"asks": {"kind": "mask"}, "schedule": GROUPS, "density": {"kind": "diffusion"}}, {}),
        ({"schedule": {"kind": "context"}, "density": {**ERROR, "decoder": "mlp"}}, {}),
        ({"asks": {"kind": "mask"}}, {"model": {"positions": "none"}}),
        ({"density": {"kind": "place"}, "schedule": {"kind": "context"}}, {}),
        ({"density": {"kind": "place"}}, {"model": {"positions": "rope_2d"}}),
        (
            {
                "reads": {"kind": "colors", "vocabulary_size": 12},
                "density": {"kind": "categorical"},
                "memory": {"kind": "encoded_image", "patch_size": 8},
            },
            {},
        ),
        # A second key that depends on the first.
        ({"schedule": RANDOM}, {"model": {"positions": "rope_1d"}}),
        ({"schedule": {**RANDOM, "prefix": 3}, "asks": {**SHIFT, "place": "both"}}, {}),
        ({"schedule": {**ORDER, "prefix": 300}}, {}),
        ({"schedule": {**ORDER, "prefix": 2}, "asks": {**SHIFT, "start": False}}, {}),
        ({"schedule": {**ORDER, "prefix": 3}, "asks": {"kind": "query"}}, {}),
        (
            {
                "schedule": {**GROUPS, "num_groups": 40, "boundaries": [4, 40]},
                "asks": {"kind": "query"},
            },
            {},
        ),
        (
            {
                "schedule": {**GROUPS, "num_groups": 40, "length": "given"},
                "asks": {"kind": "query"},
            },
            {},
        ),
        (
            {
                "density": {
                    "kind": "diffusion",
                    "learns_variance": True,
                    "noise_steps": 500,
                    "sampling_steps": 1000,
                }
            },
            {},
        ),
        (
            {
                "density": {
                    "kind": "diffusion",
                    "decoder": "linear",
                    "decoder_width": 5,
                    "condition_on_gamma": True,
                }
            },
            {"parallel": {"tensor_model_parallel_size": 2}},
        ),
        (
            {
                "schedule": {"kind": "context"},
                "asks": {"kind": "visible"},
                "density": {
                    **ERROR,
                    "decoder": "mlp",
                    "decoder_width": 8,
                    "decoder_positions": True,
                },
            },
            {},
        ),
        (
            {
                "schedule": {"kind": "masked"},
                "asks": {"kind": "mask"},
                "predicts": {**IDS, "patch_size": 5},
                "density": {"kind": "categorical"},
            },
            {},
        ),
        (
            {"memory": {"kind": "encoded_image", "hidden_size": 15, "num_attention_heads": 3}},
            {"parallel": {"tensor_model_parallel_size": 2}},
        ),
        ({"asks": {"kind": "instruct", "zero_start": True}}, {"model": {"positions": "none"}}),
        ({"asks": {**SHIFT, "zero_start": True}}, {"model": {"positions": "rope_2d"}}),
        ({"schedule": {**ORDER, "order": "round_robin"}}, {"data": {"frames": [12, 5]}}),
        (
            {"reads": IDS, "density": {"kind": "categorical"}},
            {"data": {"frames": [12, 5]}},
        ),
    ],
)
def test_each_remedy_is_enough(words, sections):
    tree = copy.deepcopy(TREE)
    tree["objective"] |= {"reads": PATCHES, "schedule": ORDER, "asks": SHIFT, "density": ERROR}
    tree["objective"] |= words
    for name, keys in sections.items():
        tree[name] = {**tree[name], **keys}
    if "frames" in tree["data"]:
        tree["data"]["image_size"] = 0
        if tree["objective"]["reads"] == PATCHES:
            tree["objective"]["reads"] = {"kind": "frames"}
    _, faults = checked(tree)
    assert faults
    for key, text in faults:
        assert advised(key, text), text
        for choice in advised(key, text):
            left = checked(followed(tree, choice))[1]
            assert {name for name, _ in left} < {name for name, _ in faults}, (choice, left)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_accepted_builds(build_paper, seed):
    numbers = random.Random(seed)
    tree = drawn(numbers)
    tree["parallel"] = {"zero_stage": 0}
    *_, accepted = follow(tree, numbers)
    objective, _ = build_paper(yaml.safe_dump(accepted))
    assert objective.flops_per_image() > 0
