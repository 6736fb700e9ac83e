"""Training of VQGANs."""
