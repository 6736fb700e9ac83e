"""DARL: "Denoising Autoregressive Representation Learning"."""
