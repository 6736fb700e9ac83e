"""Many short runs: sweeps over keys, and the search for a learning rate."""
