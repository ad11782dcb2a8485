"""The end of a run on the terminal: one table, throughput, the folder, and the digest as the last line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evalengine.records.evidence import open_run
from evalengine.records.lm_eval_file import (
    REJECTED,
    THINKING_TRUNCATED,
    UNANSWERED,
    metrics_of,
    read_results,
    results_files,
)
from evalengine.records.manifest_data import CacheUse, Cluster, Manifest, credit_words, not_run, resumed_fast
from evalengine.report.numbers import arrow, outcome_words, shown
from evalengine.report.read.groups import in_groups
from evalengine.report.read.load import load_run
from evalengine.report.stats.kappa import judge_lines
from evalengine.report.stats.metric_interval import cut_lines, wilson
from evalengine.util.sheet import Sheet
from evalengine.util.tables import print_lines

COLUMNS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")  # as in lm-eval


def stderr_notes(results: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    """A sentence for scores of 0 or 1, whose ± 0 claims certainty, and one for tasks whose documents are related."""
    for task, samples in results.get("n-samples", {}).items():
        values, count = results["results"].get(task, {}), samples.get("effective", 0)
        for metric, filter_name, value, stderr in metrics_of(values):
            if value in (0, 1) and stderr == 0 and count > 1:
                low, high = wilson(int(value) * count, count)
                words = f"all {count} documents score {value:g}; its 95 % interval is {low:.4f} to {high:.4f}"
                yield f"{task} {metric}, {filter_name}: {words} (the ± claims certainty)"
    datasets = manifest.content.get("datasets") or {}
    for task, facts in datasets.items():
        clusters, rows = facts.get("clusters"), facts.get("rows")
        if clusters and rows and clusters < rows:
            yield (
                f"{task}: {rows:,} documents in {clusters:,} clusters of related ones: the ± takes them as unrelated, "
                "as lm-eval does; the intervals of the page, of compare and of gate do not"
            )


def print_report(folder: Path) -> str:
    """Prints a finished run's report to standard output; returns the run's digest. Raises `ConfigError` if it is
    unfinished or edited."""
    manifest = open_run(folder)
    results = read_results(results_files(folder)[-1])
    # The records are read for it, which a run without cut answers need not have done.
    cut = cut_lines(load_run(folder, page=False)) if manifest.counts.length_limited else ()
    lines = (
        *summary_lines(manifest),
        *cut,
        *stderr_notes(results, manifest),
        str(folder),
        f"digest: {manifest.digest}",
    )
    print_lines((results_table(results), *lines))
    return manifest.digest


def results_table(results: Mapping[str, Any]) -> Sheet:
    """lm-eval's table: a row per metric and filter, in the tasks' order."""
    rows = []
    for task, depth in in_groups(results):
        values = results["results"][task]
        name = str(values.get("alias", task)) if depth or task in (results.get("group_subtasks") or {}) else task
        label = [f"{'  ' * depth}{name}", str(results["versions"].get(task, "N/A"))]
        if not any(metrics_of(values)):  # a tag is a heading over its tasks
            rows.append([label[0], *[""] * (len(COLUMNS) - 1)])
        better = results["higher_is_better"].get(task, {})
        for metric, filter_name, value, stderr in metrics_of(values):
            which = better.get(metric)
            mark = arrow(which if isinstance(which, bool) else None)
            shots = str(results["n-shot"].get(task, ""))
            error = ("", "") if stderr is None else ("±", _number(stderr))
            rows.append([*label, filter_name, shots, metric, mark, _number(value), *error])
            label = ["", ""]
        for name in (THINKING_TRUNCATED, REJECTED, *UNANSWERED):
            if (count := values.get(name)) is not None:
                rows.append([*label, "", "", name, "↓", str(count), "", ""])
    return Sheet("Results", COLUMNS, rows, (0, 2, 4, 5, 7))


def summary_lines(manifest: Manifest) -> Iterator[str]:
    """The run's requests, its speed, and the caveats about its numbers."""
    counts, seconds = manifest.counts, manifest.timings.run_seconds
    level, device = manifest.numerics, manifest.hardware.device
    resumed = counts.resumed_requests
    not_computed = f", {resumed} of them answered by the interrupted run" if resumed else ""
    if cached := counts.cached_requests:
        not_computed += f", {cached} {'' if resumed else 'of them '}read from the cache"
    yield f"{counts.requests} requests of {counts.documents} documents{not_computed}; numerics {level} on {device}"
    if resumed_fast(manifest):
        yield (
            "fast numerics and an interrupted run: bits depend on the batches, so the same command may not give these "
            "again (resume=never runs all requests in one go; batch_invariant=true makes the question go away)"
        )
    ran, prompt, output = counts.requests - not_run(counts), counts.prompt_tokens, counts.output_tokens
    if ran and seconds > 0:
        yield (
            f"{seconds:.1f} s: {ran / seconds:.2f} requests/s, {prompt / seconds:.1f} prompt tokens/s, "
            f"{output / seconds:.1f} {manifest.output_kind} tokens/s"
        )
    if cluster := manifest.cluster:
        yield _replicas_line(cluster)
    if cache := manifest.cache:
        yield from _cache_lines(cache)
    if processors := manifest.model.processors:  # none in the manifests of older versions
        yield (
            f"generated tokens are chosen under the checkpoint's {', '.join(sorted(processors))} "
            "(generation_config.json; model.generation_config=none ignores it)"
        )
    credit, more = credit_words(manifest), "raise task.generation.max_gen_toks"
    for count, what in (
        (counts.truncated_prompts,
         "prompts were truncated from the left to fit max_model_len (long_prompts=error rejects them)"),
        (counts.length_limited - counts.truncated_thinking,
         f"generations reached the length limit, so their answers may be missing; {more}"),
        (counts.truncated_thinking,
         f"generations reached max_gen_toks while they thought, so they contain no answer ({credit}); {more}"),
        (counts.unended_thinking,
         f"generations stopped before the end of their thinking, so they contain no answer ({credit}); check "
         "model.think_end_token and task.generation.until"),
        (counts.own_exemplar_prompts,
         "prompts contain their own document among the exemplars: their scores say little"),
        (counts.special_token_documents,
         "documents contain a special token's string, as <|endoftext|>: it was read as the token, as lm-eval does"),
    ):  # fmt: skip
        if count:
            yield f"{count} {what}"
    for task, outcomes in manifest.programs.outcomes.items() if manifest.programs else ():
        yield f"{task}: {sum(outcomes.values())} generated programs, {outcome_words(outcomes)}"
    yield from judge_lines(manifest)


def _replicas_line(cluster: Cluster) -> str:
    """Who answered, and what became of them."""
    replicas = cluster.replicas
    hosts = len({replica.host for replica in replicas})
    said = f"{len(replicas)} replicas on {hosts} host{'s' * (hosts > 1)}"
    if lost := sum(replica.lost is not None for replica in replicas):
        said += f", {lost} of them lost in mid-run"
    if refused := len(cluster.refused):
        said += f", {refused} refused"
    if audited := cluster.audited:
        said += f"; {audited} requests were answered by two of them, in equal bits"
    if cluster.unaudited:
        said += f"; {cluster.unaudited} were to be audited and are not, for want of a second one"
    if suspect := [f"{replica.host} {replica.device}" for replica in replicas if replica.suspect]:
        said += f"; suspect: {', '.join(suspect)}"
    return said


def _cache_lines(cache: CacheUse) -> Iterator[str]:
    """Caveats about the answers that were not computed."""
    if cache.audited:
        yield f"{cache.audited} of the answers read from the cache were computed again: equal in every bit"
    if cache.corrupt:
        yield f"{cache.corrupt} entries of the cache were damaged; their requests were computed again"
    if cache.failed:
        yield f"the run went on without its cache: {cache.failed}"


def _number(value: Any) -> str:
    return shown(value, ".4f") if isinstance(value, float) else str(value)
