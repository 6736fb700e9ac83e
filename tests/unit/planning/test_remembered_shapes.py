"""Shapes are computed once, and are what the operations give."""

import pytest
import torch
import torch.nn.functional as F

from megavis.planning.meta_device import LiveStorages, RememberedShapes, place_of

X = torch.empty(4, 6, device="meta").t()


def forms(results):
    results = results if isinstance(results, tuple | list) else (results,)
    return [(each.shape, each.stride(), each.dtype) for each in results]


@pytest.mark.parametrize(
    "compute",
    [
        lambda: X + 1,
        lambda: X + 1.5,
        lambda: X == 1,
        lambda: X.to(torch.bfloat16) @ X.t().to(torch.bfloat16),
        lambda: X.sum(0),
        lambda: X.sum(0, keepdim=True),
        lambda: X.topk(2),
        lambda: X.split(2),
        lambda: F.layer_norm(X, [4]),
        lambda: X.expand(3, 6, 4) * 2,
        lambda: torch.empty_like(X),
        lambda: X.contiguous(),
    ],
)
def test_results_have_the_same_form(compute):
    expected = forms(compute())
    with RememberedShapes():
        assert forms(compute()) == expected
        assert forms(compute()) == expected


def test_numbers_of_other_types_are_other_arguments():
    counts = torch.empty(3, dtype=torch.int64, device="meta")
    with RememberedShapes():
        found = [(counts * factor).dtype for factor in (True, 1, 1.0)]
    assert found == [torch.int64, torch.int64, torch.float32]


def test_views_and_changed_arguments_keep_their_storage():
    with RememberedShapes():
        for _ in range(2):
            fresh = torch.empty(4, 6, device="meta")
            assert place_of(fresh.view(24)) == place_of(fresh)
            assert place_of(fresh.add_(1)) == place_of(fresh)
            assert place_of(fresh + 1) != place_of(fresh)


def test_gradients_pass_through():
    weight = torch.empty(6, device="meta", requires_grad=True)
    with RememberedShapes():
        for _ in range(2):
            F.layer_norm(X.t(), [6], weight).sum().backward()
    assert weight.grad.shape == (6,)


class Counted(LiveStorages):
    """Notes the operations that are run."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.ran.append(operation)
        return super().__torch_dispatch__(operation, types, args, kwargs)


def test_a_norm_is_computed_once_for_a_shape():
    images = torch.empty(31, 5, device="meta")  # of no other test: all contexts share the shapes
    # Modes see an operation from the last one entered to the first.
    with Counted() as outer, RememberedShapes(), LiveStorages() as inner:
        for _ in range(3):
            F.layer_norm(images, [5])
        F.layer_norm(images[:2], [5])
    assert outer.ran.count(torch.ops.aten.native_layer_norm.default) == 2
    # Storages are counted as if it had been computed each time.
    assert inner.made == 3 * (31 * 5 + 31 + 31) * 4 + (2 * 5 + 2 + 2) * 4
