"""Generate images."""
