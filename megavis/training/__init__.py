"""Train a run: engine, loop, callbacks."""
