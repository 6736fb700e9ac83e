"""Compare generated, completed or reconstructed images with real ones."""
