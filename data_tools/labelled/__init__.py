"""Readers of labelled data sets, from the files as their authors publish them."""
