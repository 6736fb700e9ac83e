"""Training: engine, loop, callbacks, fault tolerance and searches."""
