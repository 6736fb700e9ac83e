"""Whole logical tensors on disk."""
