"""The files of a checkpoint: folder, manifest, tensors read back."""
