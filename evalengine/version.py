"""The package's version, in a module of its own that every package may import."""

__version__ = "0.1.0"  # pyproject.toml says the same
