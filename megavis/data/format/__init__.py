"""On-disk format: tar shards, their indexes, and the manifest of a folder."""
