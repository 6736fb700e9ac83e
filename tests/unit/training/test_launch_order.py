"""Kernels start in the order of issue where a tensor group's collectives overlap with products."""

import os

import pytest

from megavis.config.section import ParallelConfig
from megavis.training.job import _order_launches

pytestmark = pytest.mark.once
NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.mark.parametrize(
    ("tensor", "stage", "wanted"), [(1, 1, None), (2, 1, "1"), (2, 0, "1"), (2, 3, None)]
)
def test_one_queue_with_a_tensor_group_below_zero_3(monkeypatch, tensor, stage, wanted):
    monkeypatch.setattr(os, "environ", {})
    _order_launches(ParallelConfig(tensor_model_parallel_size=tensor, zero_stage=stage))
    assert os.environ.get(NAME) == wanted


def test_variable_of_the_user_is_kept(monkeypatch):
    monkeypatch.setattr(os, "environ", {NAME: "8"})
    _order_launches(ParallelConfig(tensor_model_parallel_size=2, zero_stage=1))
    assert os.environ[NAME] == "8"
