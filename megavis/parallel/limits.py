"""Limits of this process."""

from __future__ import annotations

import resource

_MOST_OPEN_FILES = 1 << 16
_SHARE_OF_MAPS = 4


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to the hard limit, at most 65,536.

    Many systems keep the soft limit at 1,024 only for programs that call `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [limit for limit in (hard, _MOST_OPEN_FILES) if limit != resource.RLIM_INFINITY]
    if soft != resource.RLIM_INFINITY and soft < min(limits):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits), hard))


def allowed_open_files() -> int:
    """Return how many files this process may have open once `allow_open_files` was called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_bounded(hard), _bounded(soft))


def most_open_maps(num_parts: int = 1, *, allowed: int | None = None) -> int:
    """Return how many shards of a data set stay mapped: a share of the limit of open files.

    Each map holds a file descriptor, and each thread that reads may hold one more. A random order
    over more shards than maps would reopen a file for nearly each sample.

    Args:
        num_parts: data sets that are read together, in a blend.
        allowed: the limit; default: this process's.
    """
    if allowed is None:
        allowed = _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(1, allowed // _SHARE_OF_MAPS // num_parts)


def _bounded(limit: int) -> int:
    return _MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else min(limit, _MOST_OPEN_FILES)
