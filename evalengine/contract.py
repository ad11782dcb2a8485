"""The numerics contract's version (NUMERICS.md), in a module of its own that every package may import."""

CONTRACT_VERSION = 2  # any change of arithmetic raises it (CONTRIBUTING.md)
