"""Processes, groups and randomness."""
