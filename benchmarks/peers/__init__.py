"""megavis against widely used code, step by step.

Each peer is a plain PyTorch loop around a model of `transformers` or `timm`: its own preparation of
pixels, parameter groups, learning rates, optimizer and loss. Both start from the same weights, see
the same images in the same order, and use the same random draws. Dropout and drop path are off, and
everything is in float32, so the losses differ only by rounding.
"""
