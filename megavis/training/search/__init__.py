"""Sweeps over keys, and the learning-rate search."""
