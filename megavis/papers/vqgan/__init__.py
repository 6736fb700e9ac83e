"""A VQGAN, in training."""
