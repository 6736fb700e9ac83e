"""The VAE of GIVT's latents, in training."""
