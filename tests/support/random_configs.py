"""Random configs of any paper, drawn from the types and ranges of its keys."""

import random
import re
from dataclasses import replace

import torch
import yaml
from pydantic import BaseModel, ValidationError
from tiny import VIT, tiny

from megavis.config.checks import check_config
from megavis.config.papers import paper_config
from megavis.config.schema import RunConfig

TREE = yaml.safe_load(tiny("{name: igpt}", model={**VIT, "norm_epsilon": 1e-5}))
POSITIONS = (None, None, "none", "learned", "rope_2d", "sincos", "relative_2d")
DATA = ({"image_size": 16}, {"image_size": 16}, {"image_size": 12}, {"frames": [12, 5]})
PARALLEL = (
    {},
    {},
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"context_parallel_size": 2},
    {"pipeline_model_parallel_size": 4},
)
INTEGERS = (0, 1, 2, 3, 4, 4, 4, 5, 8, 12, 16, 64, 300)
NUMBERS = (0.0, 1e-6, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0, 3.0)
WIDEST, DEEPEST = 512, 16
KEY = re.compile(r"objective(?:\.[a-z0-9_]+)+")


def drawn(name, numbers):
    """Return the tree of a random run of a paper."""
    schema = paper_config(name).model_json_schema()
    tree = {**TREE, "objective": {**_section(schema, schema, numbers), "name": name}}
    tree["optimizer"] = {"learning_rate": 1e-2}
    hidden = numbers.choice((16, 16, 18))
    tree["model"] = {**TREE["model"], "positions": numbers.choice(POSITIONS), "hidden_size": hidden}
    tree["data"] = {"train": "shards", "image_size": 0, **numbers.choice(DATA)}
    tree["parallel"] = {**TREE["parallel"], **numbers.choice(PARALLEL)}
    if numbers.random() < 0.2:
        tree["finetune"] = {"num_classes": 3, "generative_weight": numbers.choice((0.0, 1.0))}
        tree["data"]["validation"] = "held"
        tree["training"] = {**TREE["training"], "validate_every": 1}
    return tree


def checked(tree):
    """Return the config and its faults; None where a key alone is out of range."""
    try:
        objective = paper_config(tree["objective"]["name"]).model_validate(tree["objective"])
        config = RunConfig.model_validate({**tree, "objective": objective})
    except ValidationError:
        return None
    return config, list(check_config(config))


def unknown_keys(config, key, text):
    """Return the keys of a message that stand in no config of this kind.

    A word that the message says to exchange, by its `kind`, may have other keys then.
    """
    keys = [key, *KEY.findall(text)]
    exchanged = [each.removesuffix("kind") for each in keys if each.endswith(".kind")]
    kept = [each for each in keys if not each.startswith((*exchanged,))]
    return [each for each in kept if not _exists(config, each)]


def _exists(config, key):
    section = config
    for name in key.split("."):
        if not isinstance(section, BaseModel):
            return False
        if name not in type(section).model_fields:
            return False
        section = getattr(section, name)
    return True


def _is_small(section):
    """Return whether no width and no number of layers in a section, with defaults, is large."""
    for name, value in section:
        if isinstance(value, BaseModel):
            if not _is_small(value):
                return False
        elif name == "hidden_size" or name.endswith(("width", "layers")):
            most = DEEPEST if name.endswith("layers") else WIDEST
            if (value or 0) > most:
                return False
    return True


def check_messages(name, count, seed=0):
    """Check random configs of a paper, and what is said of them; count accepted and refused."""
    numbers, counts = random.Random(seed), {True: 0, False: 0}
    for _ in range(count):
        found = checked(drawn(name, numbers))
        if found is None:
            continue
        config, faults = found
        counts[not faults] += 1
        for key, text in faults:
            assert not unknown_keys(config, key, text), (key, text)
            assert not {"{", "}", "\n"} & set(text), text
            assert text.strip() == text, text
        if not faults:
            assert config.objective.num_further_blocks(config) >= 0
            reason = config.objective.cannot_generate(config)
            assert reason is None or not unknown_keys(config, "name", reason), reason
    return counts


def take_steps_of_accepted(build_paper, name, count, seed):
    """Build random configs that are accepted, and train each by a step; count those that trained.

    Wide and deep ones are left out. Those that read or predict through a run, which does not exist,
    are built alone.
    """
    numbers, built, trained = random.Random(seed), 0, 0
    while built < count:
        tree = {**drawn(name, numbers), "parallel": {"zero_stage": 0}}
        found = checked(tree)
        if found is None or found[1] or not _is_small(found[0].objective):
            continue
        objective, inference = build_paper(yaml.safe_dump(tree), std=0.1)
        assert objective.flops_per_image() > 0
        built += 1
        grammar = objective.backbone.grammar
        words = (grammar.reads, grammar.predicted, grammar.condition)
        named = any(
            "tokenizer" in type(word).model_fields and word.tokenizer for word in words if word
        )
        kinds = [word.kind for word in words[:2]]
        if named or grammar.memory or kinds == ["patches", "ids"]:
            continue
        batch = objective.backbone.blank_batch(2, torch.device("cpu"))
        if kinds[0] == "ids":  # As of shards that hold them, which need no tokenizer.
            ids = torch.arange(2 * objective.backbone.num_tokens).view(2, -1)
            batch = replace(batch, inputs=ids % grammar.reads.vocabulary_size)
        state = objective.training_sequence(batch)
        inputs = state.inputs
        for layer in inference.layers.modules:
            inputs = layer(inputs)
        loss = objective.loss(inputs, state.targets)
        loss.backward()
        assert torch.isfinite(loss), tree
        trained += 1
    return trained


def _section(schema, root, numbers):
    required = schema.get("required", [])
    return {
        key: _value(keys, root, numbers)
        for key, keys in schema["properties"].items()
        if key in required or "const" in keys or numbers.random() < 0.5
    }


def _value(keys, root, numbers):
    if "$ref" in keys:
        return _section(root["$defs"][keys["$ref"].rpartition("/")[2]], root, numbers)
    if "oneOf" in keys or "anyOf" in keys:
        return _value(numbers.choice(keys.get("oneOf") or keys["anyOf"]), root, numbers)
    if "const" in keys:
        return keys["const"]
    if "enum" in keys:
        return numbers.choice(keys["enum"])
    kind = keys.get("type")
    if kind in ("integer", "number"):
        choices = INTEGERS if kind == "integer" else NUMBERS
        return numbers.choice([each for each in choices if _is_in_range(each, keys)])
    if kind == "boolean":
        return numbers.random() < 0.5
    if kind == "array" and "prefixItems" in keys:
        return [_value(each, root, numbers) for each in keys["prefixItems"]]
    if kind == "array":
        return numbers.choice(([1, 0], [4, 9], [*range(15, -1, -1)], [9, 4]))
    if kind == "string":
        return numbers.choice(("random", "raster")) if "order" in str(keys) else "run"
    return None


def _is_in_range(value, keys):
    return (
        value >= keys.get("minimum", value)
        and value <= keys.get("maximum", value)
        and value > keys.get("exclusiveMinimum", value - 1)
        and value < keys.get("exclusiveMaximum", value + 1)
    )
