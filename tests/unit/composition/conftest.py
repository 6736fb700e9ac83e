"""What the tests of compositions share."""

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from megavis.model import kernels


@pytest.fixture(autouse=True)
def _blocks_run_uncompiled(monkeypatch):
    """What these tests look at on a GPU that they pretend are the operators of blocks."""
    monkeypatch.setattr(kernels._Setting, "library", "regions")


@pytest.fixture(scope="session")
def fake_gpu():
    """Return one mode for all tests, as tensors cached per device belong to it.

    Orders are created on the host with the model and copied to the device here.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)
