"""A gate for CI: a run of this change is compared with a baseline in git. Exit code 0: merge, 1: do not.

    python examples/ci_gate.py [BASELINE.json]

Without a file the script makes a run and takes it as the baseline. In CI the file is written once, from a run that is
good (`python -m evalengine baseline RUN -o baseline.json`), and committed. conf/gate/ci/ has it for GitHub and GitLab.
"""

from __future__ import annotations

import sys

import evalengine


def main(baseline: str | None = None) -> int:
    """Makes the run, judges it by two policies, and returns the exit code."""
    settings = {"limit": 4, "resume": "never"}
    held_to = baseline or evalengine.evaluate("asset:tinymath", "arithmetic", **settings)
    run = evalengine.evaluate("asset:tinymath", "arithmetic", **settings)
    gates = [evalengine.gate(held_to, run, policy=policy) for policy in ("bitwise", "tokens")]
    for gate in gates:
        print(gate)
    return 0 if all(gate.passed for gate in gates) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
