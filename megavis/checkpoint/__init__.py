"""Checkpoints of full logical tensors: saved from any layout, loaded into any other."""
