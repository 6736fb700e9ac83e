"""Counts in messages."""

import pytest

from megavis.config.errors import counted


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "shard"), "0 shards"),
        ((1, "shard"), "1 shard"),
        ((1000, "shard"), "1,000 shards"),
        ((1, "process", "processes"), "1 process"),
        ((2, "process", "processes"), "2 processes"),
    ],
)
def test_counted(arguments, text):
    assert counted(*arguments) == text
