"""`megavis bench`: consistency of its measurements and classification of kernels."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from megavis.config.load import load_config
from megavis.parallel.launch import read_launch
from megavis.training.bench import PARTS, bench, shares, times_of

NAMES = {
    "triton_tem_fused_0": "attention",
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, bf16>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matrix products",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN": "matrix products",
    "aten::mm": "matrix products",
    "aten::addmm": "matrix products",
    "aten::baddbmm": "matrix products",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "c10d::allreduce_": "communication",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "aten::copy_": "copies",
    "aten::_fused_adamw_": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>": (
        "optimizer"
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": None,
    "aten::_softmax": None,
    "aten::native_layer_norm": None,
}


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_kernels_are_classified(name, part):
    found = shares([(name, 2.0)])
    assert sum(found.values()) == 1.0
    assert [key for key, share in found.items() if share] == [part or list(found)[-1]]
    assert list(found)[:-1] == list(PARTS)


def test_bench_measures_a_step(small_config, tmp_path):
    config = load_config(small_config).config
    trace = tmp_path / "new" / "trace.json"
    result = bench(config, read_launch({}), num_steps=3, device="cpu", trace=trace)
    assert result.images_per_second == pytest.approx(8 / result.step_seconds)
    assert result.tokens_per_second == pytest.approx(16 * 8 / result.step_seconds)
    assert min(result.host_seconds, result.product_tflops, result.tflops_per_device) > 0
    assert 0.01 < result.memory_gb < 32
    assert (result.num_processes, result.slowest_rank, result.peak_tflops) == (1, 0, None)
    assert sum(result.parts.values()) == pytest.approx(1.0)
    assert min(result.parts["matrix products"], result.parts["attention"]) > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
    assert json.loads(json.dumps(result.as_json()))["batch_size"] == 8


def test_time_on_a_gpu_counts_each_kernel_once():
    """torch counts kernels again in their operator, and a named range as all that it spans."""

    def event(name, device, microseconds, *, is_range=False):
        span = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(
            name=name, device_type=device, time_range=span, is_user_annotation=is_range
        )

    found = [
        event("aten::mm", DeviceType.CPU, 5.0),
        event("nvjet_hsh_128x256", DeviceType.CUDA, 3.0),
        event("Optimizer.step#AdamW.step", DeviceType.CUDA, 90.0, is_range=True),
        event("multi_tensor_apply_kernel", DeviceType.CUDA, 1.0),
    ]
    profiler = SimpleNamespace(events=lambda: found)
    times = dict(times_of(profiler, torch.device("cuda")))
    assert times == {"nvjet_hsh_128x256": 3.0, "multi_tensor_apply_kernel": 1.0}
    assert shares(times.items())["optimizer"] == 0.25
