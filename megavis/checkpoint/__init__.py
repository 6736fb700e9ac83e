"""Checkpoints as whole logical tensors: saved by any layout, read by any other."""
