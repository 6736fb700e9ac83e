"""Shard format, sample codecs, sample order and batch loading."""
