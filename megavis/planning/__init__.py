"""Cost of a run before it starts: parameters, memory, communication, time, and layouts."""
