"""MAR: "Autoregressive Image Generation without Vector Quantization"."""
