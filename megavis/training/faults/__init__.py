"""What keeps a run going: signals, hangs, bad steps, damaged weights, restarts."""
