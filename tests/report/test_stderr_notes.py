"""What the terminal says beside lm-eval's standard errors."""

from __future__ import annotations

from evalengine.records.manifest_data import Manifest
from evalengine.report.run_table import stderr_notes

RESULTS = {
    "results": {
        "t": {"alias": "t", "acc,none": 0.0, "acc_stderr,none": 0.0, "f1,none": 1, "f1_stderr,none": "N/A"},
        "u": {"acc,none": 0.5, "acc_stderr,none": 0.1},
    },
    "n-samples": {"t": {"original": 9, "effective": 2}, "u": {"original": 9, "effective": 9}},
}


def test_a_score_of_nothing_is_no_certainty() -> None:
    """0 of 2 stood as 0.0000 ± 0.0000."""
    assert [*stderr_notes(RESULTS, Manifest({}))] == [
        "t acc, none: all 2 documents score 0; its 95 % interval is 0.0000 to 0.6576 (the ± claims certainty)"
    ]


def test_related_documents_are_said() -> None:
    facts = {"u": {"rows": 9, "clusters": 3}, "v": {"rows": 9, "clusters": 9}, "w": {"rows": 9, "clusters": None}}
    (line,) = stderr_notes({}, Manifest({"datasets": facts}))
    assert line.startswith("u: 9 documents in 3 clusters of related ones: the ± takes them as unrelated")
