"""Words of messages."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 shard`, `2 shards`, `1,000 shards`.

    Args:
        count: at least 0.
        noun: in the singular.
        plural: if it is not the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
