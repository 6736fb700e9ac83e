"""Engines, schedule, loop and hooks."""
