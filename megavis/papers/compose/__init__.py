"""Compose tokens, schedule, asking, density and condition in a YAML file."""
