"""Tokenizers: images to sequences of tokens and back."""
