"""What of two runs cannot be compared, since a source does not hold it."""

from __future__ import annotations

from evalengine.report.lm_eval_samples import ROLLING
from evalengine.report.runs import Run

UNBOUND = "its files are not bound (its manifest does not list their hashes), so edits would pass unseen"


def unchecked(a: Run, b: Run) -> list[str]:
    """What was not compared, a sentence each."""
    notes = []
    for label, run in (("A", a), ("B", b)):
        if run.kind == "lm-eval":
            notes.append(
                f"{label} is an lm-eval folder: it holds texts, log-likelihood sums and scores, but no token ids, "
                "no logprobs by token and no digest; two such outputs are equal as far as those tell"
            )
        elif run.unbound:
            notes.append(f"{label}: {UNBOUND}")
        elif run.by_lm_eval:
            notes.append(
                f"{label} is a baseline of an lm-eval folder: it holds log-likelihood sums, answers and scores, but no "
                "outputs and no digest; what was generated cannot be compared"
            )
        elif run.kind == "baseline":
            notes.append(f"{label} is a baseline: it holds hashes and scores, no tokens and no logprobs by token")
    alike = a.by_lm_eval == b.by_lm_eval  # lm-eval's model_sha is the Hub's commit: it compares with its like only
    for names, label in ((("weights", "model_sha"), "the model weights"), (("tokenizer",), "the tokenizer")):
        known = names if alike else names[:1]
        lacking = [which for which, run in (("A", a), ("B", b)) if not any(run.identity.get(name) for name in known)]
        if lacking:
            notes.append(f"{' and '.join(lacking)} did not record a hash of {label}: equality was not checked")
    notes += [f"{task}: no hashes of documents or prompts that both hold: equality was not checked"
              for task in sorted(_unhashed(a, b))]  # fmt: skip
    if not alike:
        notes += [f"{task}: lm-eval's files hold a log-likelihood a document, so the other run's windows were summed"
                  for task in sorted({item.task for item in a.items.values() if item.kind == ROLLING})]  # fmt: skip
    return notes


def _unhashed(a: Run, b: Run) -> set[str]:
    """Tasks with a request of both runs that no hash of both covers: a baseline of ours holds other ones than lm-eval's
    files."""
    found = set()
    for key in a.items.keys() & b.items.keys():
        prompts = a.items[key].prompt_sha256 and b.items[key].prompt_sha256
        documents = all(key[1] in run.hashes.get(key[0], {}) for run in (a, b))
        if not prompts and not documents:
            found.add(key[0])
    return found
