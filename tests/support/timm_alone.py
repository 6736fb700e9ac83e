"""Import timm, or single modules of it, without torchvision, which may fail to load."""

import contextlib
import importlib
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock, patch

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


class TorchvisionStub:
    """Import hook that mocks torchvision, which timm imports for data pipelines not used here."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def whole_timm():
    """Import timm without torchvision, whose wheel does not load with every torch."""
    pytest.importorskip("huggingface_hub", reason="timm imports it")
    before = set(sys.modules)
    stubs = [] if "torchvision" in before else [TorchvisionStub()]
    with patch.object(sys, "meta_path", [*stubs, *sys.meta_path]):
        yield pytest.importorskip("timm", reason="pip install timm, to compare with it")
    # Later imports must find the real modules.
    for name in [n for n in sys.modules if n.partition(".")[0] in ("timm", "torchvision")]:
        if name not in before:
            del sys.modules[name]
