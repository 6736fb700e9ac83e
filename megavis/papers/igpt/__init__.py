"""iGPT: "Generative Pretraining from Pixels"."""
