"""Scalars of configs are those of YAML 1.2, in files and on the command line."""

import math
import re
import subprocess
import sys

import pytest

from megavis.config.errors import UserError
from megavis.config.load import dump_config, load_config
from megavis.config.yaml_tree import ConfigSource, apply_override, dump_tree, read_tree

pytestmark = pytest.mark.once

# YAML 1.2.2, section 10.3.2. PyYAML's own values, of YAML 1.1, are on the right.
SCALARS = [
    ("0042", 42),  # 34
    ("0100", 100),  # 64
    ("0123", 123),  # 83
    ("-010", -10),  # -8
    ("+12", 12),
    ("089", 89),  # "089"
    ("0o17", 15),  # "0o17"
    ("0x1F", 31),
    ("0b11", "0b11"),  # 3
    ("1_000", "1_000"),  # 1000
    ("1_0.5", "1_0.5"),  # 10.5
    ("12:30:45", "12:30:45"),  # 45045
    ("1:30", "1:30"),  # 90
    ("190:20:30.15", "190:20:30.15"),  # 685230.15
    ("on", "on"),  # True
    ("off", "off"),  # False
    ("Yes", "Yes"),  # True
    ("no", "no"),  # False
    ("TRUE", True),
    ("2024-01-02", "2024-01-02"),  # a date
    ("2024-13-45", "2024-13-45"),  # an error
    ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),  # a time
    ("1e-3", 1e-3),  # "1e-3"
    ("1e3", 1000.0),
    ("007.50", 7.5),
    (".5", 0.5),
    ("5.", 5.0),
    ("-.INF", -math.inf),
    ("~", None),
    ("Null", None),
    ("'0042'", "0042"),
    ("=", "="),  # an error
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_are_those_of_yaml_1_2(tmp_path, text, value):
    path = tmp_path / "a.yaml"
    path.write_text(f"key: {text}\nrow: [{text}]\n")
    source = ConfigSource(str(path))
    tree = read_tree(path, source)
    apply_override(tree, f"word={text}", source)
    for found in (tree["key"], tree["row"][0], tree["word"]):
        assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", [text for text, _ in SCALARS] + ["0o18", "<<", "1.e+5", "nan"])
def test_text_and_values_are_written_so_that_they_are_read_back(tmp_path, text):
    path = tmp_path / "a.yaml"
    tree = {"text": text, "row": [text], "value": dict(SCALARS).get(text)}
    path.write_text(dump_tree(tree))
    assert read_tree(path, ConfigSource("")) == tree


def test_a_seed_with_zeros_in_front_is_decimal(tiny_config, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"based_on: {tiny_config}\nseed: 0042\n")
    config = load_config(path, ["training.steps=0100"]).config
    assert (config.seed, config.training.steps) == (42, 100)
    path.write_text(dump_config(config))
    assert load_config(path).config == config


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("name: 0123", "name: input should be a valid string, not 123; write it in quotes to keep"),
        ("seed: 1_000", "seed: input should be a valid integer, not '1_000'; write it without '_'"),
        ("seed: 0b11", "seed: input should be a valid integer, not '0b11'"),
        (
            "data: {flip: yes}",
            "data.flip: input should be a valid boolean, not 'yes'; write true",
        ),
        ("data: {flip: Off}", "data.flip: input should be a valid boolean, not 'Off'; write false"),
        ("data: {validation: None}", "data.validation: YAML spells it null, not None"),
        ("training: {steps: 1:40}", "training.steps: input should be a valid integer, not '1:40'"),
        ("seed: 18446744073709551616", "seed: input should be less than 18446744073709551616"),
    ],
)
def test_a_word_of_yaml_1_1_is_an_error_with_its_line(tiny_config, tmp_path, line, sentence):
    path = tmp_path / "a.yaml"
    path.write_text(f"based_on: {tiny_config}\n{line}\n")
    with pytest.raises(UserError, match=re.escape(f"{path}:2: {sentence}")):
        load_config(path)


@pytest.mark.parametrize("place", ["file", "word"])
def test_a_number_with_thousands_of_digits_is_one_short_sentence(tiny_config, tmp_path, place):
    path, digits = tmp_path / "a.yaml", "1" * 5000
    path.write_text(f"based_on: {tiny_config}\nseed: {digits if place == 'file' else 1}\n")
    with pytest.raises(UserError) as raised:
        load_config(path, [] if place == "file" else [f"seed={digits}"])
    assert len(str(raised.value)) < 300
    assert str(raised.value).startswith(f"{path}:2: " if place == "file" else "command line: seed")


def test_the_largest_seed_trains(tiny_config, tmp_path):
    words = [str(tiny_config), f"output={tmp_path}", f"seed={2**64 - 1}"]
    words += ["training.steps=1", "schedule.warmup_steps=0"]
    command = [sys.executable, "-m", "megavis.cli", "train", *words, "--device", "cpu"]
    subprocess.run(command, check=True, timeout=300)
