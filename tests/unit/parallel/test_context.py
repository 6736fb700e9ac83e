"""What opening a job changes in its process, and closing restores."""

import dataclasses
import os
import resource
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from children import in_child

from megavis.config.errors import UserError
from megavis.config.section import ParallelConfig
from megavis.parallel import context
from megavis.parallel.context import (
    close_context,
    num_contexts,
    open_context,
    open_virtual_context,
    require_device,
)
from megavis.parallel.launch import read_launch


@pytest.mark.parametrize("before", [{}, {"RANK": "5", "MASTER_PORT": ""}], ids=["unset", "set"])
def test_closing_restores_environment_and_hook(monkeypatch, before):
    """A command that a notebook starts afterwards must not take itself for a rank."""
    names = list(read_launch({}).environment())
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    hook = sys.excepthook
    for _ in range(2):
        open_context(read_launch({}), device="cpu")
        assert os.environ["RANK"] == "0"
        close_context()
        assert {name: os.environ[name] for name in names if name in os.environ} == before
        assert sys.excepthook is hook


def test_closing_a_virtual_job_restores_the_hook():
    hook = sys.excepthook
    open_virtual_context(1, 4)
    close_context()
    assert sys.excepthook is hook


def test_a_process_alone_opens_contexts_inside_each_other(brief_context):
    inner = open_context(read_launch({}), device="cpu", deterministic=True)
    assert inner == brief_context
    assert torch.are_deterministic_algorithms_enabled()
    assert num_contexts() == 2
    close_context()
    assert not torch.are_deterministic_algorithms_enabled()
    assert num_contexts() == 1
    brief_context.barrier()


@pytest.mark.parametrize(
    ("launch", "sizes", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {}, "already joined a job"),
        ({}, {"tensor_model_parallel_size": 2}, "already joined a job"),
    ],
)
def test_a_job_of_several_processes_needs_its_own(brief_context, launch, sizes, message):
    if launch:
        launch = {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(UserError, match=message):
        open_context(read_launch(launch), ParallelConfig(**sizes), device="cpu")
    with pytest.raises(UserError, match="pretends to be one of several processes"):
        open_virtual_context(0, 2)
    assert num_contexts() == 1


def test_a_failure_while_opening_leaves_no_job():
    with pytest.raises(RuntimeError, match="world_size"):
        open_context(read_launch({}), ParallelConfig(tensor_model_parallel_size=2), device="cpu")
    assert (num_contexts(), dist.is_initialized()) == (0, False)
    open_context(read_launch({}), device="cpu")
    close_context()


def test_a_failure_while_closing_leaves_no_context(monkeypatch):
    def fail():
        raise RuntimeError("aborted")

    hook = sys.excepthook
    with monkeypatch.context() as patched:
        patched.setattr(context.parallel_state, "destroy_model_parallel", fail)
        open_context(read_launch({}), device="cpu")
    with pytest.raises(RuntimeError, match="aborted"):
        close_context()
    assert num_contexts() == 0
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    context.parallel_state.destroy_model_parallel()


def test_another_device_beside_an_open_run_is_refused(brief_context):
    for check in (require_device, partial(open_context, read_launch({}))):
        with (
            mock.patch.object(
                context,
                "current_context",
                return_value=dataclasses.replace(brief_context, device=torch.device("cuda:0")),
            ),
            pytest.raises(UserError, match="a run is open on cuda in this process"),
        ):
            check(**({"device": "cpu"} if check is not require_device else {"name": "cpu"}))


def limit_of_open_files(before):
    """Open a job under a soft limit of open files; return the limit afterwards."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
    open_context(read_launch({}), device="cpu")
    close_context()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_job_raises_the_limit_of_open_files():
    """1,024 are too few for gloo's groups of about 340 processes."""
    soft, hard = in_child(limit_of_open_files, 200)
    assert soft == min(hard, 65_536)


@pytest.mark.parametrize(("device", "wanted"), [("cpu", None), ("cuda:3", [3])])
def test_a_barrier_names_the_gpu_of_this_process(brief_context, monkeypatch, device, wanted):
    waited = []
    monkeypatch.setattr(dist, "barrier", lambda **options: waited.append(options))
    dataclasses.replace(brief_context, device=torch.device(device)).barrier()
    assert waited == [{"group": brief_context.world.group, "device_ids": wanted}]
