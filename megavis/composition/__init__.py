"""Model of papers: tokens, asking, conditions, the first layer, and the engine interface."""
