"""Tools that convert image collections to shards for `megavis train`."""

__version__ = "0.1.0"
