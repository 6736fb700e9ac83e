"""YAML to a checked RunConfig."""
