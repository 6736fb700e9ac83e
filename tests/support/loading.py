"""Batches of a data set as several data-parallel ranks read them."""

from megavis.data.loading.loader import BatchLoader

BATCH_SIZE = 12


def inputs_by_position(dataset, *, micro, ranks, start=0, stop):
    """Read steps of 12 samples from `start` to `stop` on all ranks; return inputs by position."""
    found = {}
    for rank in range(ranks):
        loader = BatchLoader(
            dataset,
            seed=5,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            accumulation_steps=BATCH_SIZE // (micro * ranks),
            start_step=start,
        )
        with loader:
            for _ in range((stop - start) * loader.accumulation_steps):
                batch = next(loader)
                found.update(zip(batch.sample_index.tolist(), batch.inputs, strict=True))
    return found
