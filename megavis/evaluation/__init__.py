"""Evaluate trained models: features, probes, likelihood and images."""
