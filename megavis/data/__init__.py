"""Shards on disk, the order in which samples are seen, and the batches made from them."""
