"""Fault tolerance: signals, hangs, bad steps, corrupted weights, restarts."""
