"""Limits of this process."""

from __future__ import annotations

import resource

_MOST_OPEN_FILES = 1 << 16


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one, at most 65,536.

    Many systems keep it at 1,024 only for programs that call `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [limit for limit in (hard, _MOST_OPEN_FILES) if limit != resource.RLIM_INFINITY]
    if soft != resource.RLIM_INFINITY and soft < min(limits):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits), hard))
