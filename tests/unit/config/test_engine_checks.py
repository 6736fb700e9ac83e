"""What `training.kernels: transformer_engine` and `training.fp8` refuse, in one sentence each."""

import contextlib
import types

import pytest
import torch

from megavis.config.errors import UserError
from megavis.training import job

KERNELS = "training.kernels=transformer_engine"
ENGINE = [KERNELS, "training.tf32=true"]
FP8 = [KERNELS, "training.fp8=true", "training.precision=bf16"]
REFUSALS = [
    (
        [KERNELS],
        "training.tf32: must be true, as transformer_engine multiplies float32 in TensorFloat-32;"
        " or set training.precision to bf16",
    ),
    (
        ["training.fp8=true", "training.precision=bf16"],
        "training.fp8: needs training.kernels transformer_engine, not auto",
    ),
    (
        [*ENGINE, "training.fp8=true"],
        "training.fp8: needs training.precision bf16, not float32",
    ),
    (
        [*ENGINE, "training.fp8=true", "training.precision=fp16"],
        "training.fp8: needs training.precision bf16, not fp16",
    ),
    (
        [*ENGINE, "parallel.zero_stage=3"],
        "parallel.zero_stage: 3 frees weights to which transformer_engine may refer until the"
        " backward pass; the nearest legal choice is 2",
    ),
    (
        [*ENGINE, "parallel.activation_checkpointing=selective"],
        "parallel.activation_checkpointing: selective frees inputs of matrix products, of which"
        " transformer_engine keeps copies; use full or none",
    ),
    (
        [*ENGINE, "training.deterministic=true"],
        "training.deterministic: torch cannot check the kernels of transformer_engine; use"
        " training.kernels auto, or false",
    ),
    (
        [*FP8, "model.hidden_size=72"],
        "model.hidden_size: 72 must be divisible by 16 for training.fp8",
    ),
    (
        [*FP8, "model.ffn_hidden_size=200"],
        "model.ffn_hidden_size: 200 must be divisible by 16 for training.fp8",
    ),
    (
        [*FP8, "model.ffn_hidden_size=144", "parallel.tensor_model_parallel_size=2"],
        "model.ffn_hidden_size: 144 must be divisible by 16 × tensor_model_parallel_size 2 for"
        " training.fp8",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS)
def test_refusals(complain, small, words, message):
    place, _, found = complain(small, *words).partition(": ")
    assert place in ("command line", "config.yaml:13"), "the word, or the section without the key"
    assert found == message


@pytest.mark.parametrize(
    "words",
    [
        ENGINE,
        [*ENGINE, "training.precision=fp16", "parallel.zero_stage=2"],
        FP8,
        [*FP8, "parallel.activation_checkpointing=full", "parallel.zero_stage=2"],
        [*FP8, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
        [*FP8, "parallel.pipeline_model_parallel_size=2"],
        [*FP8, "parallel.context_parallel_size=2"],
    ],
)
def test_accepted(read, small, words):
    read(small, *words)


def test_networks_without_blocks_are_refused(complain, small):
    vae = small.replace("name: igpt", "name: vae").partition("model:")
    text = f"{vae[0]}data:{vae[2].partition('data:')[2]}"
    assert complain(text, *ENGINE).splitlines()[0] == (
        "command line: training.kernels: transformer_engine is for Transformer blocks, and vae has"
        " none; use auto"
    )


@pytest.mark.parametrize(
    ("words", "device", "capability", "message"),
    [
        (
            ENGINE,
            "cpu",
            None,
            "training.kernels: transformer_engine needs a GPU, and the device is cpu; use auto"
            " here",
        ),
        (
            FP8,
            "cuda",
            (8, 0),
            "training.fp8: needs a GPU of compute capability 8.9 or newer (Ada, Hopper or"
            " Blackwell), not 8.0; use false here",
        ),
        (ENGINE, "cuda", (8, 0), None),
        (FP8, "cuda", (8, 9), None),
        (FP8, "cuda", (9, 0), None),
        ([], "cpu", None, None),
    ],
)
def test_devices(read, small, monkeypatch, words, device, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    loaded, place = read(small, *words), torch.device(device)
    if message is None:
        job._require_engine(loaded.config.training, place)
        return
    with pytest.raises(UserError) as caught, loaded.source.locate():
        job._require_engine(loaded.config.training, place)
    assert str(caught.value) == f"command line: {message}"


def test_start_checks_the_device(read, small, monkeypatch):
    """Before anything is opened."""
    launch = types.SimpleNamespace(world_size=1, local_rank=0)
    config = read(small, *ENGINE).config
    with pytest.raises(UserError, match="needs a GPU"), job.open_job(config, launch, device="cpu"):
        pass


def test_segments_are_not_deterministic_on_a_gpu():
    training = types.SimpleNamespace(deterministic=True)
    for task, device, refused in (
        ("segments", "cuda", True),
        ("segments", "cpu", False),
        ("classes", "cuda", False),
    ):
        config = types.SimpleNamespace(training=training, finetune=types.SimpleNamespace(task=task))
        expected = pytest.raises(UserError, match="finetune.task segments has no deterministic")
        with expected if refused else contextlib.nullcontext():
            job._require_deterministic(config, torch.device(device))
