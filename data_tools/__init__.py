"""Tools that turn image collections into the shards that `megavis train` reads."""

__version__ = "0.1.0"
