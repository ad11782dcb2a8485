"""The versions of the package and of its numerics contract, in their own module that every package may import."""

__version__ = "0.1.0"  # pyproject.toml says the same
CONTRACT_VERSION = 3  # of NUMERICS.md; any change of arithmetic raises it (CONTRIBUTING.md)
RECURRENT_CONTRACT_VERSION = 4  # of models with a gated delta rule or Mamba-2; 4 brought their form in chunks
