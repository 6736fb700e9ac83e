"""The compiled regions become Triton kernels for an H100 (sm_90), without a GPU.

Inductor generates the kernels from fake CUDA tensors, and Triton compiles them to machine code.
"""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megavis.model import activations, kernels

# Interfaces of Inductor that are not public; other versions may lack them.
VERSION = "2.14."
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        not torch.__version__.startswith(VERSION) or torch.version.cuda is None,
        reason=f"written for the interfaces of Inductor in torch {VERSION}x with CUDA",
    ),
]

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


@pytest.fixture
def pretended_h100(monkeypatch, tmp_path):
    """Let Inductor and Triton generate code for an H100."""
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_helpers as helpers
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(helpers, "set_driver_to_gpu", lambda: None)
    pretended = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
    )
    monkeypatch.setattr(driver, "_active", pretended)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: H100)
    for owner in (CudaInterface, CudaInterface.Worker):
        monkeypatch.setattr(owner, "get_device_properties", staticmethod(lambda *_: H100))
    monkeypatch.setattr(CudaInterface, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CudaInterface, "get_compute_capability", staticmethod(lambda *_: 90))
    with inductor.patch(compile_threads=1, use_static_cuda_launcher=False):
        yield
    # They remember whether there is a GPU.
    for value in vars(torch.utils._triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def code_for_gpu(function, shapes):
    """Return Inductor's code for a function of tensors with these shapes and dtypes."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    for node in traced.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    traced.recompile()
    with FakeTensorMode() as mode:
        inputs = [torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in shapes]
        traced = make_fx(traced)(*inputs)
        lowering = GraphLowering(traced, example_inputs=inputs, shape_env=None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(V.set_debug_handler(DebugContext()))
            stack.enter_context(V.set_graph_handler(lowering))
            stack.enter_context(V.set_fake_mode(mode))
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def compiled_kernels(code):
    """Compile the Triton kernels in Inductor's code; return their PTX and machine code."""
    from torch._inductor.codecache import PyCodeCache

    binaries = []
    for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", code, re.DOTALL):
        names = vars(PyCodeCache.load(source)).values()
        [kernel] = [value for value in names if hasattr(value, "precompile")]
        kernel.precompile(warm_cache_only=True)
        made = (result.kernel.asm for result in kernel.compile_results)
        binaries += [(asm["ptx"], asm["cubin"]) for asm in made]
    return binaries


def with_gradients(plain, num_inputs):
    """Return a function that computes a region, and its gradients of the first inputs."""

    def run(*inputs):
        leaves = [each.detach().requires_grad_() for each in inputs[:num_inputs]]
        result = plain(*leaves, *inputs[num_inputs:])
        return result, *torch.autograd.grad(result, leaves, torch.ones_like(result))

    return run


HALVES, COSINES = (4, 8, 256, 64), ((1, 1, 256, 32), torch.float32)
PAIRS, ROWS = (512, 8, 2, 64), ((256, 4), torch.int64)
REGIONS = {
    "turn": (kernels.turn, 1, lambda dtype: [(HALVES, dtype), COSINES, COSINES]),
    "attend_to_few": (kernels.attend_to_few, 3, lambda dtype: [(PAIRS, dtype)] * 3),
    "nats": (kernels.nats, 1, lambda dtype: [((256, 4, 512), dtype), ROWS]),
    "vocabulary_terms": (
        kernels.vocabulary_terms,
        1,
        lambda dtype: [((256, 4, 512), dtype), ROWS],
    ),
    "quick_gelu": (activations._quick_gelu, 1, lambda dtype: [((256, 4, 5120), dtype)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REGIONS)
def test_region_compiles_to_machine_code(pretended_h100, name, dtype):
    region, num_inputs, shapes = REGIONS[name]
    function = with_gradients(region.__wrapped__, num_inputs)
    code = code_for_gpu(function, shapes(dtype))
    # Only Triton kernels: nothing falls back to torch's operators.
    assert "extern_kernels." not in code.split("def call")[1]
    assert "torch.ops.aten" not in code.split("def call")[1]
    binaries = compiled_kernels(code)
    assert binaries
    for ptx, binary in binaries:
        assert ".target sm_90" in ptx
        # An ELF file, with the machine number of CUDA.
        assert (binary[:4], int.from_bytes(binary[18:20], "little")) == (b"\x7fELF", 190)
