"""The cross-entropy of a vocabulary that two processes share, against float64 on one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megavis.config.section import ParallelConfig
from megavis.model.heads import split_cross_entropy
from megavis.parallel.context import close_context, open_context
from megavis.parallel.launch import Launch
from megavis.planning.meta_device import num_bytes, saved_tensors

pytestmark = pytest.mark.once

TOKENS, IMAGES, VOCABULARY = 43, 3, 130


def draw() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits in bf16, ids, and gradients of the losses, of which every third is zero."""
    generator = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(TOKENS, IMAGES, VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (TOKENS, IMAGES), generator=generator)
    slopes = torch.randn(TOKENS, IMAGES, generator=generator)
    slopes.view(-1)[::3] = 0.0
    return logits.bfloat16(), ids, slopes


class Collectives(TorchDispatchMode):
    """Count collectives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def own_part(launch: Launch, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return losses, this process's gradient, the bytes saved, and collectives of both passes."""
    context = open_context(launch, ParallelConfig(tensor_model_parallel_size=2), device="cpu")
    try:
        logits, ids, slopes = draw()
        own = logits.to(dtype).chunk(2, dim=2)[launch.rank].contiguous().requires_grad_()
        core: Any = SimpleNamespace(groups=SimpleNamespace(tp=context.tensor.group))
        product = own * 1  # The loss may take the place of its input, which a leaf cannot.
        with Collectives() as forward:
            saved, losses = saved_tensors(lambda: split_cross_entropy(product, ids, core))
        size = num_bytes(saved)
        del saved
        with Collectives() as backward:
            losses.backward(slopes)
        return losses.detach(), own.grad, size, forward.count, backward.count
    finally:
        close_context()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_processes_have_the_losses_and_gradients_of_one(
    run_job: Any, dtype: torch.dtype
) -> None:
    logits, ids, slopes = draw()
    wide = logits.double().flatten(0, 1).requires_grad_()
    expected = F.cross_entropy(wide, ids.flatten(), reduction="none").view_as(ids)
    (exact,) = torch.autograd.grad(expected, wide, slopes.double())
    parts = run_job(own_part, 2, dtype)
    for losses, *_ in parts:
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses.double(), expected.detach(), atol=4e-6, rtol=0)
        assert torch.equal(losses, parts[0][0])
    gradient = torch.cat([own for _, own, *_ in parts], dim=2)
    assert gradient.dtype == dtype
    rounding = 2.0**-23 if dtype == torch.float32 else 2.0**-8
    found = gradient.flatten(0, 1).double()
    torch.testing.assert_close(found, exact, atol=2e-6, rtol=rounding)
    assert not gradient[slopes == 0].any()
    rows = TOKENS * IMAGES
    for _, own, size, forward, backward in parts:
        # The logits or their softmax, and some numbers per row.
        assert size <= own.nbytes + 32 * rows
        assert (forward, backward) == (3 if dtype == torch.float32 else 1, 0)
