"""The size of gradient buckets changes no sum of two processes, and only rounding of more."""

import pytest
from bucket_jobs import train_with_buckets

pytestmark = pytest.mark.once
WHOLE, SMALL = 500_000_000, 2_000


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("processes", [2, 4])
def test_buckets_change_no_result(run_job, tiny_config, stage, processes):
    words = [f"parallel.zero_stage={stage}", "training.micro_batch_size=null"]
    job = (train_with_buckets, processes, str(tiny_config), words)
    whole, small = (run_job(*job, elements)[0] for elements in (WHOLE, SMALL))
    assert len(whole) == 3
    for ours, theirs in zip(small, whole, strict=True):
        if processes == 2:
            assert ours == theirs
        assert ours == pytest.approx(theirs, rel=1e-5)
