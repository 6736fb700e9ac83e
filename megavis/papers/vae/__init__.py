"""Training of the VAE whose latents GIVT models."""
