"""Shards, and the samples and batches made from them."""
