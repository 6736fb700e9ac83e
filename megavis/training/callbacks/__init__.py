"""Callbacks of the training loop, called with the state after each step."""
