"""Runs as folders that other libraries open."""
