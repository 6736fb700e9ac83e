"""Schedules: the order of an image's tokens, and which are known when others are predicted."""
