"""Processes, process groups and random numbers."""
