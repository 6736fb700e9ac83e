"""Estimate the cost of a run: parameters, memory, communication and time of each layout."""
