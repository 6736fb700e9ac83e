"""Use the stand-in for Transformer Engine in this process, and train with it."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megavis.config.load import load_config
from megavis.config.schema import RunConfig
from megavis.parallel.launch import Launch
from megavis.training.parity import Curve, train_briefly

FOLDER = Path(__file__).parent / "engine_stand_in"
_BOUND_AT_IMPORT = (
    "megatron.core.extensions.transformer_engine",
    "megavis.model.transformer_engine",
)


@contextmanager
def stand_in() -> Iterator[None]:
    """Install the stand-in, also for Megatron-Core's wrappers, and allow it on a CPU."""
    import megatron.core.extensions.transformer_engine as wrappers
    from megatron.core import extensions, utils

    from megavis import model
    from megavis.model.kernels import choose_kernels
    from megavis.training import job

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(utils, "_te_version", None)
        patch.setattr(extensions, "transformer_engine", wrappers)
        patch.delattr(model, "transformer_engine", raising=False)
        for name in _BOUND_AT_IMPORT:
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(job, "_require_engine", lambda loaded, device: None)
        try:
            yield
        finally:
            choose_kernels("auto")
            vars(model).pop("transformer_engine", None)
            for name in [*_BOUND_AT_IMPORT, *sys.modules]:
                if name in _BOUND_AT_IMPORT or name.partition(".")[0] == "transformer_engine":
                    sys.modules.pop(name, None)
    importlib.invalidate_caches()


def brief_run(launch: Launch, config: RunConfig, steps: int) -> Curve:
    """Do what `train_briefly` does, on a CPU with the stand-in."""
    with stand_in():
        return train_briefly(launch, config, steps, device="cpu")


def run_of(launch: Launch, path: str, words: list[str], steps: int) -> Curve:
    """Do the same for a config file and `key=value` words."""
    return brief_run(launch, load_config(path, words).config, steps)
