"""What trained models are worth."""
