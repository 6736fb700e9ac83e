"""Shards on disk, the sample order, and the batches made from them."""
