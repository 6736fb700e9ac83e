"""Ratios measured in one run: megavis against a reference, or one way against another."""
