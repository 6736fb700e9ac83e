"""The Transformer core."""
