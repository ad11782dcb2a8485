"""The golden digest of the default run, per contract version; `python -m tests.e2e.golden` writes this version's.

Only a change that is meant to touch arithmetic, prompts or weights may rewrite it (CONTRIBUTING.md).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evalengine import CONTRACT_VERSION
from tests.e2e.command import ROOT, Outcome, Run, finish, runs, start

GOLDEN = ROOT / "results" / "reference" / "golden.json"
REGENERATE = "python -m tests.e2e.golden"
ON_CPU = ("engine.device=cpu",)
ON_CUDA = ("engine.device=cuda", "numerics=exact")  # CUDA's default is native, whose bits are other ones


def facts(run: Run) -> dict[str, Any]:
    """What the golden file keeps of a run.

    The prompts' hash covers token ids only, so that it tells a changed tokenizer or task from changed arithmetic.
    """
    manifest = run.manifest
    (task,) = run.results
    prompts = "".join(record.prompt_sha256 for record in run.records)
    return {
        "contract_version": manifest["contract_version"],
        "numerics": manifest["numerics"],
        "task": task,
        "limit": None,
        "weights_sha256": manifest["model"]["weights_sha256"],
        "prompts_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
        "exact_match": run.results[task]["exact_match,strict-match"],
        "digest": run.digest,
    }


def read_golden() -> dict[str, dict[str, Any]]:
    """The golden file: contract version -> facts of the default run."""
    golden: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    return golden


def explain(actual: dict[str, Any], golden: dict[str, Any]) -> str:
    """Why a run's facts are not the golden ones, and what to do about it; "" if they are equal."""
    if actual == golden:
        return ""
    changed = [name for name in golden if actual[name] != golden[name]]
    if "weights_sha256" in changed:
        cause = "the bundled weights are others"
    elif "prompts_sha256" in changed:
        cause = "the prompts' token ids are others: the tokenizer, the task or its rows changed"
    else:
        cause = "weights and prompts are the same: the arithmetic, the sampler or the stop handling changed"
    values = "\n".join(f"  {name}: golden {golden[name]}, found {actual[name]}" for name in changed)
    return (
        f"The default run is not the golden one of contract version {golden['contract_version']}: {cause}.\n{values}\n"
        "If no change of numerics, prompts or weights was meant, the change is wrong, not the digest. If one was: "
        "raise CONTRACT_VERSION where arithmetic changed, say so in CHANGELOG.md, and run "
        f"`{REGENERATE}` (CONTRIBUTING.md)."
    )


def default_run(output_dir: Path, device_settings: Sequence[str] = ON_CPU) -> tuple[Outcome, Run]:
    """Runs `python -m evalengine` with every setting at its default but the folder and the device (a machine may have
    two), and returns what it printed and what it left."""
    done = finish(start(f"output_dir={output_dir}", *device_settings))
    assert done.code == 0, done.err
    (run,) = runs(output_dir)
    return done, run


def main() -> int:
    """Makes the default run on this machine's CPU, and writes its facts as this contract version's."""
    with tempfile.TemporaryDirectory() as folder:
        _, run = default_run(Path(folder) / "results")
        actual = facts(run)
    golden = {**read_golden(), str(CONTRACT_VERSION): actual}
    GOLDEN.write_text(json.dumps(golden, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{GOLDEN}: contract version {CONTRACT_VERSION}, digest {actual['digest']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
