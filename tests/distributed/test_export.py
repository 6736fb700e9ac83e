"""An export does not depend on the layout that saved the run."""

import pytest
import torch
from run_jobs import train_run
from safetensors.torch import load_file

from megavis.cli import main
from megavis.parallel.context import close_context

SPLIT = ["parallel.tensor_model_parallel_size=2", "parallel.zero_stage=3"]


def export(launch, run_folder, form, out):
    """Run `megavis export` in a worker process."""
    try:
        assert main(["export", run_folder, "--to", form, out]) == 0
    finally:
        close_context()


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_export_matches_one_process(run_job, runs, tmp_path, form):
    exported = []
    for name in ("one", "split"):
        out = tmp_path / name
        run_job(export, 1, str(runs / name), form, str(out))
        exported.append(load_file(out if form == "safetensors" else out / "model.safetensors"))
    one, split = exported
    assert set(one) == set(split)
    for name, tensor in one.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def runs(run_job, tiny_config, tmp_path_factory):
    """The same three steps on one process, and on four as TP 2 x ZeRO-3.

    Adam's first steps have the length of the learning rate, even for gradients whose sign is
    rounding error. With a tiny learning rate these stay within tolerance, while wrongly merged
    weights would differ by 1e-2.
    """
    output = tmp_path_factory.mktemp("exported")
    for name, processes, layout in (("one", 1, []), ("split", 4, SPLIT)):
        words = [f"output={output}", f"name={name}", "training.steps=3", "schedule.warmup_steps=0"]
        words += ["optimizer.learning_rate=1e-7", *layout]
        run_job(train_run, processes, str(tiny_config), words)
    return output
