"""Which shards a run was trained on, to keep them out of its evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megavis.config.errors import UserError
from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.data.loading.leakage import Shards, find_shards


def training_shards(config: RunConfig) -> Iterator[Shards]:
    """Yield the folders of `data.train`, then those of the run that fine-tuning started from.

    Shards that are gone are reported on standard error: nobody knows whether it has images of the
    test set.
    """
    for source in config.data.train_sources:
        try:
            yield find_shards(source.path, cache=config.data.cache)
        except UserError as error:
            sys.stderr.write(f"not compared with the test images: {error}\n")
    source_run = config.finetune and config.finetune.from_run
    path = Path(source_run or "") / "config.yaml"
    if source_run and path.exists():
        yield from training_shards(load_config(path).config)
