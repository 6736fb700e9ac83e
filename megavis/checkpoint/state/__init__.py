"""Save and load a model in any layout, and convert what was saved."""
