"""Recipes."""

from . import recipe

__all__ = ["recipe"]
