"""RAR: "Randomized Autoregressive Visual Generation"."""
