"""Words stored with weights, compared with what the run's config means now."""

import re
from pathlib import Path

import pytest

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.grammar.same_run import check_same_words, words_of

ROOT = Path(__file__).parents[3]
STORED = Path("runs/one/checkpoints/step-00000003")


@pytest.fixture(scope="module")
def config():
    return load_config(ROOT / "yaml_configs/gvp/demo.yaml").config


def test_equal_words_and_unknown_ones(config):
    for words in (words_of(config), None):
        check_same_words(STORED, words, config, resumes=True)


def test_what_only_training_depends_on_is_compared_on_resuming(config):
    words = words_of(config)
    words["schedule"]["loss_average"] = "images"
    check_same_words(STORED, words, config)
    text = f"{STORED}: these weights were trained with schedule.loss_average images, not batch: "
    with pytest.raises(UserError, match=re.escape(text)):
        check_same_words(STORED, words, config, resumes=True)


def test_what_weights_mean_is_compared_always(config):
    words = words_of(config)
    words["asks"]["start"] = not words["asks"]["start"]
    words["schedule"]["sideways"] = True
    with pytest.raises(UserError, match=r"schedule\..*sideways, which words no longer have"):
        check_same_words(STORED, words, config)
    del words["schedule"]["sideways"]
    with pytest.raises(UserError, match=r"trained with asks\.start (true, not false|false, not t)"):
        check_same_words(STORED, words, config)
