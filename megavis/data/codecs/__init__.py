"""What the samples of each kind of shard hold, and the transforms of images."""
