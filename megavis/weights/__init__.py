"""Export runs as folders that other libraries can open."""
