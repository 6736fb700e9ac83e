"""Checksums that see any change, and who is blamed for one."""

import pytest
import torch

from megavis.training.replicas import checksum, disagreement

pytestmark = pytest.mark.once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_any_flipped_bit_changes_the_checksum(dtype):
    tensor = torch.arange(-6, 6).to(dtype).view(3, 4)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    before = int(checksum(tensor))
    for place in range(tensor.numel()):
        for bit in range(8 * tensor.element_size() - 1):
            changed = tensor.clone()
            changed.view(integer).view(-1)[place] ^= 1 << bit
            assert int(checksum(changed)) != before
    assert int(checksum(tensor.clone())) == before
    assert int(checksum(tensor.flip(0))) != before


def test_the_checksum_is_that_of_the_words_of_its_docstring(monkeypatch):
    from megavis.training import replicas

    monkeypatch.setattr(replicas, "_PIECE", 5)
    tensor = torch.randn(17)
    bits = tensor.view(torch.int32).tolist()
    wanted = sum(one * (2 * place + 1) for place, one in enumerate(bits)) % 2**64
    assert int(checksum(tensor)) % 2**64 == wanted


def test_the_odd_one_out_is_blamed():
    agreed = {"a": 1, "b": 2}
    assert disagreement({f"rank {n}": agreed for n in range(3)}) == ""
    prints = {"rank 0": agreed, "rank 1": {"a": 1, "b": 3}, "rank 2": agreed}
    assert disagreement(prints) == "b on rank 1 differs from that of 2 others"
    # A part that is nobody else's is compared with nobody.
    assert disagreement({"rank 0": {"c (part 0)": 1}, "rank 1": {"c (part 1)": 2}}) == ""
    two = disagreement({"rank 0": {"a": 1}, "rank 1": {"a": 2}})
    assert two == "a differs between rank 0, rank 1: which is right nobody knows"
