"""Images out of models."""
