"""Shards on disk: tar files, their index, and the manifest of a folder."""
