"""Images to sequences and back. Imports nothing of `megavis.data`."""
