"""Images that a model has drawn, completed or reconstructed, beside real ones."""
