"""Transformer blocks, heads and the list of layers."""
