"""A run saved in one layout resumes in another with the same losses."""

import os
from pathlib import Path
from typing import Any

import pytest
from run_jobs import deterministic_metrics, rewind, train_run

from megavis.cli import main
from megavis.reports.page import headline
from megavis.reports.run_record import RunRecord

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "dp2-zero3-offload": (
        2,
        [
            "parallel.zero_stage=3",
            "parallel.offload_optimizer=cpu",
            "parallel.offload_parameters=cpu",
        ],
    ),
    "tp2-dp2-zero3": (
        4,
        ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=3"],
    ),
    "pp2-zero0": (
        2,
        ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=0"],
    ),
    "tp2-pp2-sp": (
        4,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.sequence_parallel=true",
        ],
    ),
    "pp2-zero2": (
        2,
        ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=2"],
    ),
    "pp2-dp2-zero3": (
        4,
        ["parallel.pipeline_model_parallel_size=2", "parallel.zero_stage=3"],
    ),
    "cp2-zero2": (2, ["parallel.context_parallel_size=2", "parallel.zero_stage=2"]),
}
NAMES = list(LAYOUTS)
# A ring through eight layouts; `make test-layouts` tests every pair of eight. Pairs that save with
# tensor parallelism are run for every version of Megatron-Core.
PAIRS = [
    pytest.param(a, NAMES[(i + 1) % len(NAMES)], marks=() if "tp2" in a else pytest.mark.once)
    for i, a in enumerate(NAMES)
]


@pytest.fixture(scope="module")
def unbroken(run_job: Any, tiny_config: Path, tmp_path_factory: Any) -> Any:
    """Folders of uninterrupted runs by layout, each trained once."""
    output = tmp_path_factory.mktemp("unbroken")
    done: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in done:
            processes, overrides = LAYOUTS[name]
            words = [*overrides, f"output={output}", f"name={name}"]
            run_job(train_run, processes, str(tiny_config), words)
            done[name] = output / name
        return done[name]

    return folder


def resume_copy(run_job: Any, tiny_config: Path, source: Path, layout: str, output: Path) -> Path:
    """Resume a copy of a run from its checkpoint of step 8 in another layout."""
    processes, overrides = LAYOUTS[layout]
    rewind(source, output / "resumed", 8)
    words = [*overrides, f"output={output}", "name=resumed"]
    run_job(train_run, processes, str(tiny_config), words)
    return output / "resumed"


@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_resume_in_another_layout(
    run_job: Any, tiny_config: Path, unbroken: Any, tmp_path: Path, saved: str, resumed: str
) -> None:
    whole = deterministic_metrics(unbroken(saved))
    folder = resume_copy(run_job, tiny_config, unbroken(saved), resumed, tmp_path)
    continued = deterministic_metrics(folder)
    assert [line["step"] for line in continued] == [line["step"] for line in whole]
    for ours, theirs in zip(continued, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.skipif(
    os.environ.get("MEGAVIS_TEST_NVME") != "1",
    reason="compiles DeepSpeed's libaio module for minutes; set MEGAVIS_TEST_NVME=1 to run it",
)
def test_nvme_offload(run_job: Any, tiny_config: Path, unbroken: Any, tmp_path: Path) -> None:
    layout = ["zero_stage=3", "offload_optimizer=nvme", "offload_parameters=nvme"]
    words = [f"parallel.{word}" for word in [*layout, f"nvme_path={tmp_path}/swap"]]
    words += [f"output={tmp_path}", "name=resumed"]
    rewind(unbroken("one"), tmp_path / "resumed", 8)
    run_job(train_run, 2, str(tiny_config), words)
    whole = deterministic_metrics(unbroken("one"))
    for ours, theirs in zip(deterministic_metrics(tmp_path / "resumed"), whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("layout", NAMES[1:])
def test_resume_in_the_same_layout_is_exact(
    run_job: Any, tiny_config: Path, unbroken: Any, tmp_path: Path, layout: str
) -> None:
    folder = resume_copy(run_job, tiny_config, unbroken(layout), layout, tmp_path)
    assert deterministic_metrics(folder) == deterministic_metrics(unbroken(layout))
    assert tensors_of(folder, 12) == tensors_of(unbroken(layout), 12)


def test_layouts_save_the_same_tensors(unbroken: Any) -> None:
    from megavis.checkpoint.format.tensor_reader import CheckpointReader

    one = unbroken("one") / "checkpoints" / "step-00000012"
    for layout in ("tp2-dp2-zero3", "tp2-pp2-sp", "pp2-dp2-zero3", "cp2-zero2"):
        other = unbroken(layout) / "checkpoints" / "step-00000012"
        with CheckpointReader(one) as ours, CheckpointReader(other) as theirs:
            assert set(ours.manifest.tensors) == set(theirs.manifest.tensors)
            for key in ours.manifest.tensors:
                mine, yours = ours.read(key), theirs.read(key)
                assert mine.shape == yours.shape, key
                # Adam amplifies rounding in 12 steps; wrongly merged tensors would differ by 1e-1.
                assert (mine - yours).abs().max() < 1e-4, key


def test_context_size_is_shown(unbroken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = unbroken("cp2-zero2")
    assert main(["checkpoint", "list", str(run)]) == 0
    assert capsys.readouterr().out.count("tp1-cp2-pp1-dp1") == 3
    assert (
        dict(headline(RunRecord.read(run)))["layout"] == "2 processes: context 2, ZeRO-2, float32"
    )


def tensors_of(run_folder: Path, step: int) -> dict[str, bytes]:
    from megavis.checkpoint.format.tensor_reader import CheckpointReader

    with CheckpointReader(run_folder / "checkpoints" / f"step-{step:08d}") as reader:
        return {key: reader.read(key).numpy().tobytes() for key in reader.manifest.tensors}
