"""The `megavis` commands, one file each."""
