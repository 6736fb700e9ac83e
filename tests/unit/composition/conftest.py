"""What the tests of compositions share."""

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(scope="session")
def fake_gpu():
    """Return one mode for all tests, as tensors cached per device belong to it.

    Orders are created on the host with the model and copied to the device here.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)
