"""The sample order, and the batches made from shards."""
