"""Triton kernels of Inductor's code, run on a CPU by Triton's interpreter.

Triton decides when it is imported whether to interpret, so this runs in a process of its own:
`open_interpreter` starts it.
"""

import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.runtime.triton_helpers as helpers
import torch._inductor.runtime.triton_heuristics as heuristics
import triton.language as tl
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BLOCK = 64
"""Elements of a block, in each dimension of a kernel."""

Values = list[Tensor | int | None]


@contextmanager
def open_interpreter() -> Iterator[Callable[[str, Values], Values]]:
    """Yield a function of Inductor's code and its inputs on a CPU that returns its outputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(_prepare).result()
    with pool:
        yield lambda code, inputs: pool.submit(_outputs, code, inputs).result()


def _prepare() -> None:
    """Replace in this process what needs a GPU."""
    helpers.set_driver_to_gpu = lambda: None
    # The interpreter replaces functions of `tl` while a kernel runs, and lacks CUDA's library.
    helpers.libdevice = SimpleNamespace(exp=lambda x: tl.exp(x))
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
    InterpreterBuilder.create_dot = _dot(InterpreterBuilder.create_dot)
    for name in ("pointwise", "reduction", "persistent_reduction", "template"):
        setattr(heuristics, name, _undecorated)
    AsyncCompile.triton = lambda _, name, source, **__: _Kernel(name, source)
    AsyncCompile.wait = lambda *_: None
    torch.cuda._DeviceGuard = lambda _: nullcontext()
    torch.cuda.set_device = lambda _: None


def _cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Return the cast with float32 rounded to bf16 as on a GPU; the interpreter truncates it."""

    def rounded(builder: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, source, target)
        values = torch.from_numpy(source.data).bfloat16().view(torch.uint16)
        return TensorHandle(values.numpy(), tl.bfloat16)

    return rounded


def _dot(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Return the matrix product with bf16 as numbers; the interpreter multiplies their bits."""

    def product(builder: InterpreterBuilder, *operands: Any) -> Any:
        wide = [
            builder.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in operands[:2]
        ]
        return dot(builder, *wide, *operands[2:])

    return product


def _undecorated(**_: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def _outputs(code: str, inputs: Values) -> Values:
    names: dict[str, Any] = {"__name__": "generated"}
    exec(compile(code, "generated", "exec"), names)
    names["empty_strided_cuda"] = names["empty_strided_cpu"]
    names["get_raw_stream"] = lambda _: 0
    return list(names["call"](list(inputs)))


class _Kernel:
    """A kernel, called as Inductor's code calls it."""

    def __init__(self, name: str, source: str) -> None:
        # Triton reads the source of a kernel from its file.
        path = Path(tempfile.mkdtemp(), f"{name}.py")
        path.write_text(source)
        names: dict[str, Any] = {"__name__": name, "__file__": str(path)}
        exec(compile(source, str(path), "exec"), names)
        self._kernel = names[name]

    def run(self, *arguments: Any, stream: int) -> None:
        assert stream == 0
        names = self._kernel.arg_names
        blocks = {name: BLOCK for name in names if name.endswith("BLOCK")}
        plain = [name for name in names if name not in blocks]
        values, grid = arguments[: len(plain)], arguments[len(plain) :]
        if not grid:
            counts = dict(zip(plain, values, strict=True))
            sizes = itertools.takewhile(lambda axis: f"{axis}numel" in counts, "xyz")
            grid = tuple(-(-counts[f"{axis}numel"] // BLOCK) for axis in sizes)
        self._kernel[grid](*values, **blocks)
