"""Single modules of timm: the package wants torchvision, whose usual wheel does not load here."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest


def timm_module(folder, name):
    """Import timm/<folder>/<name>.py alone; skips where timm is not installed."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("pip install --no-deps timm, to compare with it")
    package = types.ModuleType(f"timm_{folder}")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / folder)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")
