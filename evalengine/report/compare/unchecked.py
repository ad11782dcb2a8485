"""What cannot be compared between two runs, since a source does not hold it."""

from __future__ import annotations

from collections.abc import Iterator

from evalengine.report.read.lm_eval_samples import BY_CHOICE, ROLLING
from evalengine.report.read.run import UNBOUND, Run

_WEIGHTS = ("weights", "model_sha")


def unchecked(a: Run, b: Run) -> list[str]:
    """What was not compared, a sentence each."""
    notes = []
    for label, run in (("A", a), ("B", b)):
        if run.kind == "lm-eval":
            notes.append(
                f"{label} is {run.files}: it holds texts, log-likelihood sums and scores, but no token ids, "
                "no logprobs by token and no digest; two such outputs are equal as far as those tell"
            )
        elif run.unbound:
            notes.append(f"{label}: {UNBOUND}")
        elif run.by_lm_eval:
            notes.append(
                f"{label} is a baseline of {run.files}: it holds log-likelihood sums, answers and scores, but no "
                "outputs and no digest; what was generated cannot be compared"
            )
        elif run.kind == "baseline":
            notes.append(f"{label} is a baseline: it holds hashes and scores, no tokens and no logprobs by token")
    for label, run in (("A", a), ("B", b)):
        if read := run.manifest.from_cache:
            notes.append(
                f"{label} read {read} of its {len(run.items)} answers from a cache: an earlier run computed them, and "
                "what this one would have computed is not compared"
            )
    for names, label in ((_WEIGHTS, "the model weights"), (("tokenizer",), "the tokenizer")):
        if lacking := _lacking(a, b, names):
            notes.append(f"{lacking} did not record a hash of {label}: equality was not checked")
    notes += [f"{task}: no hashes of documents or prompts that both hold: equality was not checked"
              for task in sorted(_unhashed(a, b))]  # fmt: skip
    notes += _unknown_choices(a, b)
    if a.by_lm_eval != b.by_lm_eval:
        notes += [f"{task}: lm-eval's files hold a log-likelihood a document, so the other run's windows were summed"
                  for task in sorted({item.task for item in a.items.values() if item.kind == ROLLING})]  # fmt: skip
    return notes


def unrecorded_weights(a: Run, b: Run) -> str:
    """Which of two runs recorded no hash of its weights that can be compared with the other's; "" if both did."""
    lacking = _lacking(a, b, _WEIGHTS)
    return f"{lacking} did not record a hash of the model weights" if lacking else ""


def _lacking(a: Run, b: Run, names: tuple[str, ...]) -> str:
    """Which runs lack a hash, such as `A and B`. lm-eval's model_sha, a commit on the Hub, compares with its like."""
    comparable = names if a.by_lm_eval == b.by_lm_eval else names[:1]
    return " and ".join(
        label for label, run in (("A", a), ("B", b)) if not any(run.identity.get(name) for name in comparable)
    )


def _unhashed(a: Run, b: Run) -> set[str]:
    """Tasks with a shared request that no hash in both runs covers: a baseline of ours and lm-eval's files hold unlike
    hashes."""
    tasks = set()
    for key in a.items.keys() & b.items.keys():
        prompts = a.items[key].prompt_sha256 and b.items[key].prompt_sha256
        documents = all(key[1] in run.hashes.get(key[0], {}) for run in (a, b))
        if not prompts and not documents:
            tasks.add(key[0])
    return tasks


def _unknown_choices(a: Run, b: Run) -> Iterator[str]:
    """Multiple-choice metrics whose choices a run does not hold, so that another wrong choice would pass unseen."""
    several = {key[0] for key, item in a.items.items() if item.kind == "loglikelihood" and key[2] > 0}
    shared = a.scores.keys() & b.scores.keys()
    for task in sorted(several):
        metrics = sorted(key for key in shared if key[0] == task and key[1] in BY_CHOICE)
        metrics = [key for key in metrics if {*a.scores[key].values(), *b.scores[key].values()} <= {0.0, 1.0}]
        for label, run in (("A", a), ("B", b)):
            if unknown := [key[1] for key in metrics if key not in run.choices]:
                why = (
                    "its baseline was written without" if run.kind == "baseline" else "its scores follow no known rule"
                )
                yield (
                    f"{task}: {label} does not say which choice {' and '.join(dict.fromkeys(unknown))} took ({why}): "
                    "another wrong one would pass unseen"
                )
