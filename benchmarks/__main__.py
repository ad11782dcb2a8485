"""`python -m benchmarks [NAME ...]`: see `--help`. Exit codes are those of `python -m evalengine`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import arguments
from evalengine.util.command import exit_code


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks that the words name; returns the exit code."""
    return exit_code(lambda: arguments.main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
