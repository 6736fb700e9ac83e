"""Codecs for the samples of each shard kind, and image transforms."""
