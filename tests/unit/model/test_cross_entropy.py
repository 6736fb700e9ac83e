"""The cross-entropy of logits against float64, and the memory of its passes."""

import pytest
import torch
import torch.nn.functional as F
from children import in_child

from megavis.model import kernels
from megavis.planning.meta_device import LiveStorages, num_bytes, saved_tensors

pytestmark = pytest.mark.once

# Tokens, images and vocabulary: fewer tokens than pieces, as many, and more than divide evenly.
SIZES = [(1, 1, 3), (5, 2, 18), (8, 1, 63), (43, 3, 129)]
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9}


def draw(tokens, images, vocabulary, dtype=torch.float32):
    """Return logits, ids, and gradients of the losses, of which every third is zero."""
    generator = torch.Generator().manual_seed(tokens)
    logits = 4 * torch.randn(tokens, images, vocabulary, generator=generator)
    ids = torch.randint(vocabulary, (tokens, images), generator=generator)
    slopes = torch.randn(tokens, images, generator=generator)
    slopes.view(-1)[::3] = 0.0
    return logits.to(dtype).requires_grad_(), ids, slopes


def whole(logits, ids):
    """Return torch's cross-entropy of all rows at once."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)


def of_parts(logits, ids, count=3):
    """Return the losses of a vocabulary in `count` parts, as processes of a group have them."""
    terms = []
    for part, own in enumerate(logits.chunk(count, dim=-1)):
        terms.append(kernels.vocabulary_terms(own, ids - part * own.shape[-1]))
    totals, logit_of_target = torch.stack(terms, dim=-1).unbind(2)
    return totals.logsumexp(-1) - logit_of_target.sum(-1)


def check(compute, logits, ids, slopes):
    """Compare losses and the gradient of logits with float64, up to rounding."""
    losses = compute(logits, ids)
    (gradient,) = torch.autograd.grad(losses, logits, slopes)
    wide = logits.detach().double().requires_grad_()
    expected = whole(wide, ids)
    (exact,) = torch.autograd.grad(expected, wide, slopes.double())
    assert (losses.dtype, gradient.dtype) == (torch.float32, logits.dtype)
    torch.testing.assert_close(losses.double(), expected.detach(), atol=4e-6, rtol=0)
    rounding = 2 * ROUNDING[logits.dtype]
    torch.testing.assert_close(gradient.double(), exact, atol=2e-6, rtol=rounding)
    assert not gradient[slopes == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", [kernels.cross_entropy, of_parts])
@pytest.mark.parametrize("size", SIZES)
def test_cross_entropy_matches_float64(size, compute, dtype):
    logits, ids, slopes = draw(*size, dtype)
    check(compute, logits, ids, slopes)
    # All rows of the first image are masked out, and logits are not contiguous.
    slopes[:, 0] = 0.0
    strided = logits.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    check(compute, strided, ids, slopes)


def test_pieces_have_the_bits_of_the_whole():
    for size in SIZES:
        logits, ids, slopes = draw(*size)
        found, expected = kernels.cross_entropy(logits, ids), whole(logits, ids)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(each, logits, slopes)[0] for each in (found, expected)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", [kernels.cross_entropy, kernels.vocabulary_terms])
def test_only_logits_are_kept_and_their_gradient_is_the_peak(compute, dtype):
    logits, ids, _ = draw(64, 4, 512, dtype)
    with LiveStorages() as forward:
        saved, values = saved_tensors(lambda: compute(logits, ids))
    assert num_bytes(saved) == logits.nbytes + ids.nbytes
    # Four tensors of a piece in float32 besides what is saved and returned.
    piece = 4 * logits.numel() / kernels.NUM_PIECES
    assert forward.most <= 4 * piece + 2 * values.nbytes
    slopes = torch.ones_like(values)
    with LiveStorages() as backward:
        torch.autograd.grad(values, logits, slopes)
    assert logits.nbytes < backward.most <= logits.nbytes + 6 * piece
    assert backward.most < 2 * 4 * logits.numel()


@pytest.mark.parametrize("name", ["cross_entropy", "vocabulary_terms"])
def test_compiled_kernels_keep_logits_and_no_float32_copy(name):
    # In a child, as Inductor leaves threads and variables.
    in_child(compare_with_compiled, name)


def compare_with_compiled(name):
    """Compile a cross-entropy; compare what it saves, its values and its gradients."""
    compute = getattr(kernels, name)
    compiled = torch.compile(compute.__wrapped__, fullgraph=True)
    logits, ids, _ = draw(16, 4, 512, torch.bfloat16)
    saved, values = saved_tensors(lambda: compiled(logits, ids))
    # Besides the logits, a few numbers per row.
    assert num_bytes(saved) <= logits.nbytes + 32 * ids.numel()
    plain = compute(logits, ids)
    torch.testing.assert_close(values, plain)
    slopes = torch.randn_like(values)
    found, expected = (torch.autograd.grad(each, logits, slopes)[0] for each in (values, plain))
    torch.testing.assert_close(found, expected)
