"""How a token is predicted, scored and drawn."""
