"""Device selection and GPU arithmetic settings, with simulated GPUs."""

import os
import socket

import pytest
import torch

from megavis.config.errors import UserError
from megavis.data.loading.loader import Batch, BatchLoader
from megavis.parallel import context as context_module
from megavis.parallel import device as device_module
from megavis.parallel.context import close_context, open_context
from megavis.parallel.device import choose_device, full_float32, set_arithmetic
from megavis.parallel.launch import Launch
from megavis.tokenizers.vae import VAE, VAEShape
from megavis.tokenizers.vqgan import VQGAN, VQGANShape
from megavis.training.parity import device_for


@pytest.fixture
def gpus(monkeypatch):
    """Make torch report GPUs that fail on use; return the devices passed to `set_device`."""
    chosen = []

    def fail(*_args, **_options):
        raise AssertionError("asked for a GPU")

    def show(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "current_device", fail)
        monkeypatch.setattr(Batch, "pin_memory", fail)
        return chosen

    return show


@pytest.mark.parametrize(
    ("name", "local_rank", "visible", "device"),
    [
        (None, 3, 0, "cpu"),
        (None, 3, 8, "cuda:3"),
        ("cuda", 0, 8, "cuda:0"),
        ("cpu", 3, 8, "cpu"),
        # srun --gpus-per-task=1
        (None, 3, 1, "cuda:0"),
        ("cuda", 7, 1, "cuda:0"),
    ],
)
def test_choose_device_uses_the_local_rank(gpus, name, local_rank, visible, device):
    gpus(visible)
    assert choose_device(name, local_rank=local_rank) == torch.device(device)


@pytest.mark.parametrize(
    ("name", "local_rank", "visible", "message"),
    [
        ("cuda", 0, 0, "--device cuda: torch finds no GPU here; use --device cpu"),
        (None, 2, 2, "local rank 2 has no GPU: 2 are visible"),
    ],
)
def test_missing_gpu_raises(gpus, name, local_rank, visible, message):
    gpus(visible)
    with pytest.raises(UserError, match=message):
        choose_device(name, local_rank=local_rank)


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (4, 3)])
def test_deepspeed_gets_the_gpu_index_as_local_rank(gpus, monkeypatch, visible, index):
    chosen = gpus(visible)
    joined = {}

    class Joined(Exception):  # noqa: N818 - stops before a GPU is needed
        pass

    def join(backend, **_options):
        joined.update(os.environ, backend=backend)
        raise Joined

    monkeypatch.setattr(context_module.dist, "init_process_group", join)
    monkeypatch.setattr(device_module, "_select_accelerator", chosen.append)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "before")
    with pytest.raises(Joined):
        open_context(Launch(0, 1, 3, "127.0.0.1", 1))
    assert joined["backend"] == "nccl"
    assert chosen == ["cuda", torch.device("cuda", index)]
    assert joined["LOCAL_RANK"] == str(index)
    assert joined["RANK"] == "0"
    # A job that could not be joined leaves the environment alone.
    assert os.environ["LOCAL_RANK"] == os.environ["RANK"] == "before"


def test_cpu_device_does_not_touch_gpus(gpus, shards):
    from deepspeed import accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.runtime.utils import PartitionedTensor

    from megavis.data.loading.dataset import ShardDataset

    chosen = gpus(8)
    # DeepSpeed chooses this at import on a machine with GPUs.
    accelerator.set_accelerator(CUDA_Accelerator())
    context = open_context(Launch(0, 1, 0, "127.0.0.1", 1), device="cpu")
    try:
        assert context.device == torch.device("cpu")
        assert accelerator.get_accelerator().device_name() == "cpu"
        assert PartitionedTensor.from_meta.__defaults__ == ("cpu",)
        with BatchLoader(
            ShardDataset(shards / "train"),
            seed=0,
            micro_batch_size=2,
            data_parallel_rank=0,
            data_parallel_size=1,
            accumulation_steps=1,
            device=context.device,
        ) as loader:
            assert next(loader).inputs.device == torch.device("cpu")
    finally:
        close_context()
    assert not chosen


@pytest.mark.parametrize(
    ("name", "visible", "device"), [(None, 4, "cuda"), (None, 3, "cpu"), ("cpu", 8, "cpu")]
)
def test_parity_uses_gpus_if_there_is_one_per_process(gpus, name, visible, device):
    gpus(visible)
    assert device_for(name, 4) == device


def test_parity_with_more_processes_than_gpus_raises(gpus):
    gpus(3)
    with pytest.raises(UserError, match="4 processes need a GPU each, and 3 are visible"):
        device_for("cuda", 4)


SLURM_GPUS = ["SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"]


@pytest.mark.parametrize(
    "given", [{SLURM_GPUS[0]: "8"}, {SLURM_GPUS[1]: "0"}, {SLURM_GPUS[2]: "2"}]
)
@pytest.mark.parametrize("name", [None, "cuda"])
def test_node_whose_gpus_do_not_work_is_named(gpus, monkeypatch, given, name):
    gpus(0)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    # Not a UserError: with exit code 2 no launcher would try another node.
    words = f"no GPU on {socket.gethostname()}, although SLURM_.* --device cpu if that is meant"
    with pytest.raises(RuntimeError, match=words):
        choose_device(name, local_rank=0)
    assert choose_device("cpu", local_rank=0) == torch.device("cpu")
    gpus(8)
    assert choose_device(name, local_rank=0) == torch.device("cuda", 0)


@pytest.mark.parametrize("given", [{SLURM_GPUS[0]: "0"}, {SLURM_GPUS[1]: ""}])
def test_slurm_job_without_gpus_computes_on_the_cpu(gpus, monkeypatch, given):
    gpus(0)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    assert choose_device(None, local_rank=0) == torch.device("cpu")


def switches():
    """Return torch's settings of GPU precision and determinism."""
    return {
        "products": torch.backends.cuda.matmul.allow_tf32,
        "convolutions": torch.backends.cudnn.allow_tf32,
        "repeats": torch.are_deterministic_algorithms_enabled(),
        "repeats convolutions": torch.backends.cudnn.deterministic,
        "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled(),
    }


PLAIN = {
    "products": False,
    "convolutions": False,
    "repeats": False,
    "repeats convolutions": False,
    "cuDNN's attention": True,
}


def test_set_arithmetic_controls_tf32_and_determinism(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    before = switches()
    with set_arithmetic(tf32=True, deterministic=False):
        assert switches() == PLAIN | {"products": True, "convolutions": True}
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    with set_arithmetic(tf32=False, deterministic=True):
        repeats = {"repeats": True, "repeats convolutions": True, "cuDNN's attention": False}
        assert switches() == PLAIN | repeats
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert os.environ["NCCL_ALGO"] == "Ring"
        with set_arithmetic(tf32=False, deterministic=False):
            assert switches() == PLAIN
        assert switches() == PLAIN | repeats
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert switches() == before


TOKENIZERS = [
    VAE(VAEShape(latent_channels=2, filters=8, multipliers=(1, 1), blocks_per_level=1, groups=4)),
    VQGAN(VQGANShape(codebook_size=20, code_size=6, filters=32, multipliers=(1, 2))),
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)
def test_tokenizers_encode_in_full_float32(tokenizer):
    seen = []
    first = next(m for m in tokenizer.modules() if isinstance(m, torch.nn.Conv2d))
    hook = first.register_forward_hook(lambda *_: seen.append(switches()))
    with set_arithmetic(tf32=True, deterministic=False):
        tokenizer.encode(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))
        assert switches() == PLAIN | {"products": True, "convolutions": True}
    hook.remove()
    assert seen == [PLAIN | {"repeats convolutions": True}]


def test_full_float32_restores_the_previous_settings():
    with set_arithmetic(tf32=True, deterministic=False):
        with full_float32():
            assert switches() == PLAIN | {"repeats convolutions": True}
        assert switches() == PLAIN | {"products": True, "convolutions": True}
