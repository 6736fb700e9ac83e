"""What a run costs before it has begun: parameters, memory, traffic, time, and which layout."""
