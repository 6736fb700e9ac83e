"""RandAR: "RandAR: Decoder-only Autoregressive Visual Generation in Random Orders"."""
