"""Tokenizers: images to sequences of tokens and back. Does not import `megavis.data`."""
