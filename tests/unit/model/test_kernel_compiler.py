"""Whether kernels can be compiled here, and what a run does where they cannot."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from megavis.commands import doctor
from megavis.config.errors import UserError
from megavis.model import kernel_compiler, kernels

pytestmark = pytest.mark.once

NO_COMPILER = "there is no C compiler: install gcc (Debian: apt-get install gcc), or set CC"


@pytest.fixture
def compile_fails(monkeypatch):
    """Compiling raises as Triton does, on a machine with these programs."""

    def fail(_):
        raise RuntimeError("Failed to find C compiler.\nMore lines")

    monkeypatch.setattr(kernel_compiler, "compile_and_run", fail)


@pytest.fixture
def gpu_job():
    """One process of a job of two on GPUs, whose other process can compile."""
    cuda = torch.device("cuda")
    yield SimpleNamespace(device=cuda, gather=lambda own: [None, own], is_main=True)
    kernels.choose_kernels("auto")


def test_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    assert kernel_compiler.missing_tool() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_compiler.missing_tool() == NO_COMPILER
    (tmp_path / "clang").touch(mode=0o755)
    assert kernel_compiler.missing_tool() is None


def test_compiler_that_cc_names_must_exist(monkeypatch):
    monkeypatch.setenv("CC", "gcc-99")
    assert kernel_compiler.missing_tool() == (
        "the C compiler that CC names, gcc-99, is missing: install it, or unset CC"
    )
    monkeypatch.setenv("CC", sys.executable)
    assert kernel_compiler.missing_tool() is None


def test_missing_headers_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(
        kernel_compiler.sysconfig, "get_paths", lambda scheme: {"include": tmp_path}
    )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert kernel_compiler.missing_tool() == (
        f"{tmp_path}/Python.h is missing: install Python's headers"
        f" (Debian: apt-get install python{version}-dev)"
    )


def test_headers_are_where_triton_looks():
    """Triton includes this folder when it compiles a launcher."""
    from triton.runtime import build

    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.subprocess, "check_call", lambda words, **_: asked.extend(words))
        build._build("launcher", "main.c", "/nowhere", [], [], [], [])
    included = [word[2:] for word in asked if word.startswith("-I")]
    assert any(os.path.isfile(f"{folder}/Python.h") for folder in included)


def test_run_uses_plain_kernels_with_a_warning(compile_fails, gpu_job, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    kernel_compiler.require_compiled(gpu_job)
    assert kernels.chosen_kernels() == "torch"
    assert capsys.readouterr().err == (
        f"WARNING: kernels cannot be compiled: {NO_COMPILER}; plain ones are used, which are"
        " slower (training.kernels: torch)\n"
    )


def test_other_failures_are_told_too(compile_fails, gpu_job, capsys):
    kernel_compiler.require_compiled(gpu_job)
    assert "compiled: RuntimeError: Failed to find C compiler.; plain" in capsys.readouterr().err


def test_other_library_is_not_replaced(compile_fails, gpu_job, monkeypatch):
    monkeypatch.setattr(kernels._Setting, "library", "apex")
    with pytest.raises(UserError, match="kernels: apex: kernels cannot be compiled: RuntimeError"):
        kernel_compiler.require_compiled(gpu_job)


def test_plain_kernels_and_cpus_compile_nothing(compile_fails, gpu_job, capsys):
    kernels.choose_kernels("torch")
    kernel_compiler.require_compiled(gpu_job)
    kernels.choose_kernels("auto")
    gpu_job.device = torch.device("cpu")
    kernel_compiler.require_compiled(gpu_job)
    assert kernels.chosen_kernels() == "auto"
    assert capsys.readouterr().err == ""


def test_wrong_numbers_of_a_kernel_are_found(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: lambda x: function(x) + 1e-3)
    reason = kernel_compiler.why_not_compiled(torch.device("cpu"))
    assert reason == "RuntimeError: a compiled kernel computes wrong numbers on cpu"
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert kernel_compiler.why_not_compiled(torch.device("cpu")) is None


def test_doctor_requires_a_kernel_where_there_is_a_gpu(compile_fails, monkeypatch):
    finding = doctor.compiled_kernel()
    assert (finding.found, finding.required) == (False, False)
    assert finding.detail == "not tried: there is no GPU to run one"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finding = doctor.compiled_kernel()
    assert (finding.found, finding.required) == (False, True)
    assert finding.detail == "RuntimeError: Failed to find C compiler."
