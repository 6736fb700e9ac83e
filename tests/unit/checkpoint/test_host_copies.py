"""Host memory of snapshots: made ready once, written again by each save, on GPUs alone."""

import torch

from megavis.checkpoint.state.save import HostCopies


def test_memory_is_made_ready_and_used_again():
    copies, value = HostCopies(keeps=True), torch.arange(6.0).view(2, 3).t()
    copies.reserve({"weight": value.shape})
    first = copies.copy("weight", value)
    where = first.data_ptr()
    assert torch.equal(first, value)
    assert first.is_contiguous()
    second = copies.copy("weight", value + 1)
    assert second.data_ptr() == where
    assert torch.equal(second, value + 1)


def test_what_was_not_expected_is_copied_too():
    copies = HostCopies(keeps=True)
    copies.reserve({"weight": torch.Size([2])})
    assert torch.equal(copies.copy("average", torch.ones(3)), torch.ones(3))
    longer, other = torch.ones(4), torch.ones(2, dtype=torch.int64)
    assert torch.equal(copies.copy("weight", longer), longer)
    assert copies.copy("weight", other).dtype == torch.int64


def test_copies_that_are_there_are_not_made_again():
    copies = HostCopies(keeps=True)
    where = copies.copy("weight", torch.ones(2)).data_ptr()
    copies.reserve({"weight": torch.Size([2])})
    copies.wait()
    assert copies.copy("weight", torch.ones(2)).data_ptr() == where


def test_without_keeping_each_copy_is_new():
    copies, value = HostCopies(keeps=False), torch.ones(2)
    copies.reserve({"weight": value.shape})
    first, second = copies.copy("weight", value), copies.copy("weight", value)
    assert first.data_ptr() != second.data_ptr() != value.data_ptr()
