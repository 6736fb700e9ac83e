"""Import single modules of timm, since the package imports torchvision, which may fail to load."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import pytest


def timm_module(folder, name):
    """Import timm/<folder>/<name>.py alone; skip the test if timm is not installed."""
    found = importlib.util.find_spec("timm")
    if found is None:
        pytest.skip("pip install timm, to compare with it")
    package = types.ModuleType(f"timm_{folder}")
    package.__path__ = [str(Path(found.submodule_search_locations[0]) / folder)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")
