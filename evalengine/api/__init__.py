"""The package's Python functions: `evaluate` runs tasks by the code of the command line."""
