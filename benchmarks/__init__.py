"""Benchmarks that compare implementations within one run."""
