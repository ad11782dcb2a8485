"""The numerics contract's version, which stands below every package that names it (NUMERICS.md)."""

CONTRACT_VERSION = 2  # any change of arithmetic raises it (CONTRIBUTING.md)
