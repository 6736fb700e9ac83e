"""`benchmarks.gpu_check`: stored results, the report, and derived numbers."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_check import kernels
from benchmarks.gpu_check.kernels import Kernel, class_of, split_of_kernels
from benchmarks.gpu_check.planned import planned_device
from benchmarks.gpu_check.presets import PRESETS, VARIANTS, config_of, parts, strict_mfu
from benchmarks.gpu_check.refit import host_row, suggestions
from benchmarks.gpu_check.report import markdown, write_report
from benchmarks.gpu_check.results import Part, Row, Settings, StageResult, read_stage
from benchmarks.gpu_check.zero_stages import largest_difference
from megavis.config.errors import UserError
from megavis.model.flops import peak_flops
from megavis.planning.devices import DEVICES

pytestmark = pytest.mark.once


def stage(*rows, number=5, **fields):
    parts = {"part": Part(True, 1.5, rows=rows)}
    return StageResult(number, "presets", "cuda", False, parts=parts, **fields)


def test_stage_result_round_trips(tmp_path):
    row = Row("step", 12.5, "ms", "10", None, "a note", {"losses": [1.0, 2.0]})
    result = stage(row, Row("equal", True, passed=True), finished=True, facts={"torch": "2.11"})
    result.parts["broken"] = Part(False, 2.0, "RuntimeError: no", "Traceback ...")
    result.save(tmp_path)
    assert read_stage(tmp_path, 5) == result
    assert json.loads((tmp_path / "stage-5.json").read_text())["seconds"] == 3.5
    assert [path.name for path in tmp_path.iterdir()] == ["stage-5.json"]
    assert read_stage(tmp_path, 4) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"stage": 5}'])
def test_invalid_stage_file_raises(tmp_path, text):
    (tmp_path / "stage-5.json").write_text(text)
    with pytest.raises(UserError, match=r"stage-5\.json is not a stage's file .*; delete it"):
        read_stage(tmp_path, 5)


def test_report_tables_show_targets_and_failures(tmp_path):
    rows = [
        Row("step", 12.345678, "ms", "10"),
        Row("MFU", None, "%", note="means something on a GPU alone"),
        Row("same|bits", False, aim="yes", passed=False),
        Row("kernel", "flash", passed=True),
    ]
    result = stage(*rows, finished=True, facts={"device": "NVIDIA H100", "torch": "2.11"})
    other = stage(number=6, stopped="time limit of 570 s", facts={"device": "NVIDIA H200"})
    other.parts["late"] = Part(False, 3.0, "stopped by the time limit of 570 s")
    path = write_report(tmp_path, [result, other])
    lines = path.read_text().splitlines()
    assert "| device | NVIDIA H100; NVIDIA H200 |" in lines
    assert "## 5. presets (finished, 2 s)" in lines
    assert "| step | 12.35 ms | 10 |  |  |" in lines
    assert "| MFU | – |  |  | means something on a GPU alone |" in lines
    assert "| same\\|bits | no | yes | **NO** |  |" in lines
    assert "| kernel | flash |  | yes |  |" in lines
    assert "## 6. presets (time limit of 570 s, 4 s)" in lines
    assert "- late: stopped by the time limit of 570 s" in lines
    assert [tree["stage"] for tree in json.loads((tmp_path / "report.json").read_text())] == [5, 6]


def test_report_warns_about_small_sizes():
    result = dataclasses.replace(stage(), small=True)
    assert "no time here means anything" in markdown([result])


def test_strict_mfu_matches_hand_calculation():
    """Six blocks of iGPT-XL at 64²: causal attention counts half, recomputation does not count."""
    from megavis.model.flops import Workload, forward_flops

    width, tokens, colors, blocks = 3072, 4096, 512, 6
    matrices = 4 * width**2 + 2 * width * 4 * width  # multiply-adds per token and block
    attention = 2 * width * (tokens + 1) / 2
    forward = 2 * tokens * (blocks * (matrices + attention) + width * colors)
    config = config_of(PRESETS["iGPT-XL, 6 of 60 blocks"], VARIANTS["ZeRO-1"], settings(False))
    work = Workload.of_one_stream(tokens, colors, causal=True)
    assert forward_flops(config.model, work) == pytest.approx(forward, rel=1e-12)
    # Two images in 72.2 ms on an H100 of 989 TFLOP/s.
    assert strict_mfu(3 * forward, 2 / 0.0722, peak_flops("NVIDIA H100 80GB HBM3", "bf16")) == (
        pytest.approx(3 * forward * 2 / 0.0722 / 989e12)
    )
    assert strict_mfu(1e12, 494.5, 989e12) == pytest.approx(0.5)


def test_peak_of_operations_partly_in_fp8():
    """Of 4 TFLOP 3 take 3 / 1979 s in FP8, and one 1 / 989 s in bf16."""
    name = "NVIDIA H100 80GB HBM3"
    assert peak_flops(name, "bf16", 0.75) == pytest.approx(4e12 / (3 / 1979 + 1 / 989))
    assert (peak_flops(name, "bf16", 1.0), peak_flops(name, "fp16", 0.0)) == (
        pytest.approx(1979e12),
        989e12,
    )
    assert peak_flops("NVIDIA H100 PCIe", "bf16", 1.0) == pytest.approx(1513e12)
    assert peak_flops("NVIDIA H100 NVL", "bf16") == peak_flops("NVIDIA H200 NVL", "bf16") == 835e12
    assert peak_flops("NVIDIA GB200", "bf16") == 2500e12
    # No FP8 on an A100.
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16", 0.5) is None
    assert peak_flops("other", "bf16", 0.5) is None
    assert peak_flops(name, "float32") is None


def settings(small):
    from pathlib import Path

    return Settings("cpu", small, Path("nowhere"))


def test_every_preset_runs_in_every_variant():
    names = list(parts(settings(False)))
    assert names[: len(PRESETS)] == [f"{preset}, ZeRO-1" for preset in PRESETS]
    assert set(names) == {f"{preset}, {variant}" for preset in PRESETS for variant in VARIANTS}
    for preset in PRESETS.values():
        for variant in VARIANTS.values():
            config = config_of(preset, variant, settings(False))
            assert config.training.micro_batch_size == preset.images
            assert config.training.batch_size == preset.images * variant.micro_batches
            assert config.parallel.zero_stage == variant.zero_stage


def test_kernels_are_classified_by_name():
    names = {
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob": "attention",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80": "attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "triton_tem_fused_0": "attention",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTN": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128>": "products",
        "aten::mm": "products",
        "aten::addmm": "products",
        "mkldnn::_linear_pointwise": "products",
        "aten::mul": "rest",
        "void at::native::vectorized_elementwise_kernel<4>": "rest",
        "Memcpy HtoD (Pinned -> Device)": "rest",
    }
    assert {name: class_of(name) for name in names} == names


def test_attention_kernels_include_flex_attention(monkeypatch):
    def found(*names):
        averages = [SimpleNamespace(key=name) for name in names]
        profile = SimpleNamespace(key_averages=lambda: averages)
        monkeypatch.setattr(kernels, "profiled", lambda run, device: profile)
        return kernels.sdpa_kernels(lambda: None, torch.device("cpu"))

    forward = "aten::_scaled_dot_product_cudnn_attention"
    assert found("aten::mm", forward, f"{forward}_backward") == ["cudnn_attention"]
    assert found("triton_tem_fused_flex_attention_0", "triton_poi_fused_0") == ["flex_attention"]
    assert found("aten::mm") == []


def test_split_of_overlapping_kernels():
    """Microseconds: product 0-10, concurrent copy 5-20, idle until 30, attention 30-36."""
    run = [Kernel("flash_fwd", 30, 36), Kernel("gemm", 0, 10), Kernel("Memcpy", 5, 20)]
    split = split_of_kernels(run, times=2)
    assert (split.products, split.attention, split.rest) == (0.005, 0.003, 0.0075)
    assert split.busy == pytest.approx(0.013)  # half of 20 and 6
    assert list(split.longest) == ["Memcpy", "gemm", "flash_fwd"]
    assert split_of_kernels([], times=1).busy == 0.0


def test_non_finite_loss_differs_infinitely():
    assert largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert largest_difference([1.0, float("nan")], [1.0, 2.0]) == float("inf")


def test_planned_device_from_the_cuda_name():
    assert planned_device("NVIDIA H200") == DEVICES["h200"]
    assert planned_device("NVIDIA A100-SXM4-80GB") == DEVICES["a100"]
    assert planned_device("") == DEVICES["h100"]


def test_refit_suggestions_follow_measurements():
    # 4 blocks take 10 ms and 12 blocks 18: one a block, and 6 whatever the depth.
    host = [host_row("XL", "igpt", 3, (4, 12), (0.010, 0.018), (0.001, 0.0018))]
    assert (host[0].value, host[0].aim) == (pytest.approx(1.0), "0.1 planned")
    assert host[0].detail["fixed_ms"] == pytest.approx(6.0)
    speeds = [
        Row("speed: products of 8192², bfloat16", 494.5, "TFLOP/s"),
        Row("speed: copy in memory", 3015.0, "GB/s"),
    ]
    planned = dict.fromkeys(("bubble", "communication", "optimizer"), 0.0)
    planned |= {"products": 0.04, "elementwise": 0.02, "host": 0.01, "mfu": 0.5}
    split = {"products": 50.0, "attention": 10.0, "rest": 30.0}
    steps = [Row("XL, ZeRO-1: step", 90.0, "ms", detail={"planned_s": planned, "split_ms": split})]
    found = suggestions({1: speeds, 5: steps, 8: host}, DEVICES["h100"])
    assert {row.what: row.value for row in found} == {
        "refit: host time of a block at ZeRO-3": pytest.approx(1.0),
        "refit: products, largest share of the peak": pytest.approx(0.5),
        "refit: memory, largest share of the peak": pytest.approx(0.9),
        "refit: XL, ZeRO-1: over planned": pytest.approx(1.5),
        "refit: XL, ZeRO-1, products: over planned": pytest.approx(1.5),
        "refit: XL, ZeRO-1, the rest: over planned": pytest.approx(1.5),
    }
    assert suggestions({1: [], 5: [], 8: []}, None) == []
