"""Quickstart: the bundled model on four word problems, twice, in other batches. Both runs have one digest.

python examples/quickstart.py
"""

from __future__ import annotations

import evalengine


def main() -> None:
    """Runs the task one sequence at a time and four at a time, and compares the runs bit for bit."""
    alone = evalengine.evaluate("asset:tinymath", "arithmetic", limit=4, engine={"max_num_seqs": 1})
    together = evalengine.evaluate("asset:tinymath", "arithmetic", limit=4, engine={"max_num_seqs": 4})
    print(alone)
    print(evalengine.compare(alone, together))
    print(f"one digest: {alone.digest == together.digest}")


if __name__ == "__main__":
    main()
