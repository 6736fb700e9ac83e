"""Requirements of a plan's training data on a node: files and bytes per second, and cache size."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megavis.config.errors import UserError
from megavis.config.section import ConfigIssue, DataConfig
from megavis.data.format.manifest import Manifest
from megavis.data.loading.disk_cache import cached_files
from megavis.data.loading.needs import DataNeeds, data_needs, needs_lines
from megavis.data.loading.remote import is_remote, stored_manifest
from megavis.data.loading.stores import Store
from megavis.parallel.limits import allowed_open_files
from megavis.planning.devices import Cluster
from megavis.planning.plan import Plan

_TRIES = 2
_ENCODED = ("latents", "ids")
"""Kinds of shards that hold a tokenizer's outputs, so that none runs in training."""


@dataclass(frozen=True)
class DataRates:
    """Rates at which a node reads training data while a layout trains.

    Attributes:
        read: bytes per second that its processes read; those of a data-parallel rank read the same.
        opened: files per second that they open.
        fetched: bytes per second that it fetches from stores.
    """

    read: float
    opened: float
    fetched: float

    @classmethod
    def of(cls, needs: DataNeeds, plan: Plan, cluster: Cluster) -> DataRates:
        """Return the rates at a plan's time of a step."""
        layout, seconds = plan.layout, plan.time.total
        own = layout.micro_batch_size * layout.accumulation_steps / seconds
        on_node = own * cluster.devices_per_node
        return cls(
            read=on_node * needs.bytes_a_sample,
            opened=on_node * needs.opens_a_sample,
            fetched=own * layout.data * needs.fetched_a_sample,
        )


def find_needs(data: DataConfig) -> DataNeeds | str:
    """Return the needs of the training data, or why they are not known here."""
    try:
        manifests = [_manifest(source.path) for source in data.train_sources]
    except (UserError, OSError) as error:
        return str(error)
    return data_needs(data, manifests, allowed_open_files())


def encodes_images(data: DataConfig) -> bool:
    """Return whether training reads images; data that cannot be read are assumed to be images."""
    for source in data.train_sources:
        with contextlib.suppress(UserError, OSError):
            if _manifest(source.path).kind in _ENCODED:
                return False
    return True


def _manifest(path: str) -> Manifest:
    if not is_remote(path):
        return Manifest.read(path)
    return stored_manifest(Store(path, attempts=_TRIES))[0]


def complaints(data: DataConfig, needs: DataNeeds) -> Iterator[ConfigIssue]:
    """Yield problems, each with the key to change; the disk is checked if it is on this machine."""
    yield from needs.complaints()
    folder = Path(data.cache or "")
    if not needs.remote or data.cache is None or not folder.is_dir():
        return
    used = sum(stat.st_size for _, stat in cached_files(folder))
    wanted = needs.cache_bytes() if needs.cache_limit is None else needs.cache_limit
    free = shutil.disk_usage(folder).free
    if wanted - used > free:
        yield (
            "data.cache",
            f"{folder} has {free / 1e9:.1f} GB free, and {(wanted - used) / 1e9:.1f} more are"
            " needed: name a folder on a larger disk, or set data.cache_gib to less",
        )


def rate_lines(needs: DataNeeds, rates: DataRates, name: str) -> Iterator[str]:
    """Yield the data's requirements, and a node's rates in the layout of that name."""
    yield from needs_lines(needs)
    fetched = ""
    if needs.remote:
        fetched = f", and fetches {rates.fetched / 1e6:,.1f} MB/s, all shards once an epoch"
        if not rates.fetched:
            fetched = ", and fetches each shard once"
    yield (
        f"a node of {name} reads {rates.read / 1e6:,.1f} MB/s and opens {rates.opened:,.3g} files"
        f" a second{fetched}"
    )


def data_json(needs: DataNeeds, rates: DataRates | None) -> dict[str, Any]:
    """Return the data's requirements in bytes, and a node's rates per second."""
    return {
        **asdict(needs),
        "index_bytes": needs.index_bytes,
        "open_shards": needs.kept,
        "cache_bytes": {
            "one_window": needs.cache_bytes(1),
            "two_windows": needs.cache_bytes(2),
            "all": needs.cache_bytes(),
        },
        "a_second": None if rates is None else asdict(rates),
    }
