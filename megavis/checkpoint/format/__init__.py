"""Files of a checkpoint: folder, manifest, and reading tensors."""
