"""Code that `torch.compile` generates for an H100 (sm_90), made without a GPU.

A function is traced on the CPU as `torch.compile` traces it, into one graph of the forward and one
of the backward pass. Inductor then generates code from fake CUDA tensors, and Triton compiles the
kernels, which needs no GPU. Uses private interfaces of torch.
"""

import copy
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch._inductor.runtime.triton_helpers as helpers
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

GPU = torch.device("cuda", 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
)


@dataclass(frozen=True)
class Generated:
    """Inductor's Python code, with Triton kernels, of the two passes of a function.

    Attributes:
        forward: takes the inputs; returns the result, then what the backward pass needs: tensors,
            then sizes.
        backward: takes sizes, tensors and the gradient of the result; returns the gradients of the
            inputs, None for those without.
        inputs: of the forward pass: those of the function, with tensors that it closes over.
    """

    forward: str
    backward: str
    inputs: list[Any]


def generated_code(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    num_differentiable: int,
    folder: str,
    *,
    num_dynamic: int = 0,
) -> Generated:
    """Return the code for an H100 of a function of CPU tensors and of its gradients.

    Args:
        function: the function.
        inputs: with the shapes and dtypes of the code.
        num_differentiable: number of inputs, the first ones, whose gradients are computed.
        folder: for the caches of Inductor and Triton.
        num_dynamic: number of dimensions of these, the first ones, whose size the code does not
            know, as after a batch of another size.
    """
    (forward, of_forward), (backward, _) = _traced(
        function, inputs, num_differentiable, num_dynamic
    )
    with _pretended_h100(folder):
        return Generated(
            _lowered(forward, is_backward=False), _lowered(backward, is_backward=True), of_forward
        )


def machine_code(code: str, folder: str) -> list[tuple[str, bytes]]:
    """Compile the Triton kernels in Inductor's code; return PTX and machine code of each."""
    binaries = []
    with _pretended_h100(folder):
        for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL):
            names = vars(PyCodeCache.load(source)).values()
            [kernel] = [value for value in names if hasattr(value, "precompile")]
            kernel.precompile(warm_cache_only=True)
            made = (result.kernel.asm for result in kernel.compile_results)
            binaries += [(asm["ptx"], asm["cubin"]) for asm in made]
    return binaries


def _traced(
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    num_differentiable: int,
    num_dynamic: int,
) -> list[tuple[GraphModule, list[Any]]]:
    """Return the graphs of both passes, each with its inputs."""
    graphs = []
    # A function that this process compiled for other shapes would be compiled for any shape.
    torch._dynamo.reset()

    def keep(graph: GraphModule, _: Any, **__: Any) -> Callable[[list[Any]], Any]:
        traced = copy.deepcopy(graph)

        def run(arguments: list[Any]) -> Any:
            graphs.append((traced, [_plain(each) for each in arguments]))
            return graph(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    leaves = [each.clone().requires_grad_() for each in inputs[:num_differentiable]]
    given = [*leaves, *(each.clone() for each in inputs[num_differentiable:])]
    for each in given:
        torch._dynamo.maybe_mark_dynamic(each, list(range(num_dynamic)))
    with pytest.MonkeyPatch.context() as patch:
        # It refuses gradients on a CPU, for want of kernels there.
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        backend = functools.partial(compile_fx, inner_compile=keep)
        result = torch.compile(function, backend=backend)(*given)
        result.backward(torch.ones_like(result))
    torch._dynamo.reset()
    return graphs


def _plain(argument: Any) -> Any:
    """Return a graph's input, a tensor or a size, without gradients."""
    return argument.detach() if isinstance(argument, Tensor) else argument


def _lowered(graph: GraphModule, *, is_backward: bool) -> str:
    _move_to_gpu(graph)
    record_original_output_strides(graph)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(inputs)
    lowering = GraphLowering(
        graph, example_inputs=inputs, shape_env=mode.shape_env, is_backward=is_backward
    )
    with (
        V.set_debug_handler(DebugContext()),
        V.set_graph_handler(lowering),
        V.set_fake_mode(mode),
    ):
        lowering.run(*inputs)
        code: str = lowering.codegen()[0].value
    return code


def _move_to_gpu(graph: GraphModule) -> None:
    def moved(tensor: FakeTensor) -> Tensor:
        with tensor.fake_mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU
            )

    def option(options: dict[str, Any]) -> dict[str, Any]:
        # Without gradients on a CPU, FlexAttention does not keep there what they need.
        return {**options, "OUTPUT_LOGSUMEXP": True} if "OUTPUT_LOGSUMEXP" in options else options

    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if "val" in node.meta:
                    node.meta["val"] = tree_map_only(FakeTensor, moved, node.meta["val"])
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": GPU}
                node.args = tuple(
                    option(each) if isinstance(each, dict) else each for each in node.args
                )
            module.recompile()


@contextmanager
def _pretended_h100(folder: str) -> Iterator[None]:
    """Let Inductor and Triton generate code for an H100."""
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor.patch(compile_threads=1, use_static_cuda_launcher=False),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
        patch.setenv("TRITON_CACHE_DIR", f"{folder}/triton")
        patch.setattr(helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(driver, "_active", target)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: H100)
        for owner in (CudaInterface, CudaInterface.Worker):
            patch.setattr(owner, "get_device_properties", staticmethod(lambda *_: H100))
        patch.setattr(CudaInterface, "is_available", staticmethod(lambda: True))
        patch.setattr(CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90))
        _forget_devices()
        yield
    _forget_devices()


def _forget_devices() -> None:
    """Clear the functions that remember whether there is a GPU."""
    for value in vars(torch.utils._triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
