"""Readers of labelled data sets in the formats in which they are published."""
