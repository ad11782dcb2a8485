"""`report.html`: everything that one run left, on one page: whether to trust it, what came out, what it cost and what
it ran on; samples and plots have their own modules."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalengine.records.evidence import PAGE
from evalengine.records.manifest_data import Manifest, credit_words, not_run, resumed_fast
from evalengine.records.shapes import fits
from evalengine.report.compare.sibling_runs import sibling
from evalengine.report.html import parts
from evalengine.report.html.comparison_page import noise_floor, noise_floor_section
from evalengine.report.html.distributions import distributions_section, likelihood_section
from evalengine.report.html.markup import Node, tag
from evalengine.report.html.page import Page
from evalengine.report.html.samples import samples_section
from evalengine.report.numbers import counted, outcome_words
from evalengine.report.read.groups import group_documents, in_groups, members, roots_of
from evalengine.report.read.lm_eval import ROLLING
from evalengine.report.read.load import load_run_data
from evalengine.report.read.run import UNBOUND, Run, RunData, ScoreKey
from evalengine.report.stats.kappa import judge_lines
from evalengine.report.stats.metric_interval import cut_of, interval_cautions, metric_interval, unanswered_of
from evalengine.report.stats.pass_at_k import with_pass_at_k

TILES = 4  # metrics shown large
MANY_ROWS = 4  # tasks whose rows are listed; those of more are folded


def summary_lead(page: Page, data: RunData) -> None:
    """The first metrics in large figures, whether they can be reproduced, and what a reader must know to trust them."""
    run, foremost = data.run, _foremost(data)
    several = len({key[0] for key in foremost}) > 1 or len(data.tasks) > 1
    large = []
    for key in foremost:
        value, error = run.results[key]
        filters = {k[2] for k in run.results if k[0] == key[0]}
        label = " ".join([key[0]] * several + [key[1]] + [key[2]] * (len(filters) > 1))
        cut = cut_of(run, key)
        below = [cut.words if cut else None, unanswered_of(run, key)]
        word = [tag("b", _interval_words(data, key, error)), "; ".join(filter(None, below)) or None]
        large.append((label, parts.percent(value) if is_share(data, key) else f"{value:,.4g}", word))
    page.lead({**parts.tiles(large), "look": "hero"}, {**parts.verdict(*_verdict(data)), "look": "badge"})
    if warnings := list(_warnings(data)):
        page.lead(parts.listed(warnings, "warnings"))
    digest = "Digest", run.digest and [tag("code", run.digest), " (equal digests mean equal bits)"]
    page.lead(tag("div", parts.facts([*parts.origin_facts(run), digest]), class_="origin"))


MOST = 12  # rows of one table: of more, each group's tasks are folded
HEAD = ("Task", "Metric", "Value", "95 % interval", "0 to 1", "Stderr", "Documents", "Cut", "Cut ones", "Finished",
        "Filter", "n-shot")  # fmt: skip
WORDS = ("Task", "Metric", "95 % interval", "0 to 1", "Filter")
ABOUT = {
    "95 % interval": "Over documents, or clusters of related ones: Wilson's for scores in [0, 1], Student's t for "
    "others; of perplexities by way of the nats by word or byte; of groups from their tasks' own",
    "Stderr": "lm-eval's",
    "Cut": "Answers that the length limit ended",
    "Cut ones": "The value on the documents whose answer was cut",
    "Finished": "The value on the other documents",
}


def interval_note(data: RunData, has_interval_by_key: Mapping[ScoreKey, bool]) -> str:
    """Why metrics have no interval, or one that may be too narrow. has_interval_by_key: whether each has one."""
    reasons: dict[str, list[ScoreKey]] = {}
    lines = []
    for key, has_interval in has_interval_by_key.items():
        if has_interval:
            lines += [f"{next(_named([key], data))}: {why}." for why in interval_cautions(data.run, key)]
        else:
            reasons.setdefault(_why(data, key), []).append(key)
    lines += [f"No interval for {', '.join(_named(keys, data))}: {why}." for why, keys in reasons.items()]
    return " ".join(lines)


def _why(data: RunData, key: ScoreKey) -> str:
    documents, scores = len(data.samples.get(key[0], {})), list(data.run.scores.get(key, {}).values())
    if key[0] not in data.samples:
        return "it is made of several tasks' results"
    if documents < 2:
        return "one document says nothing of others"
    if not scores and data.kinds.get(key[0]) == ROLLING:
        if key in data.run.weighted:
            return "its documents do not differ in it"
        return "the run does not record what each document adds to it"
    if not scores:
        return "it is no mean of numbers that the documents have"
    if not all(map(math.isfinite, scores)):
        return "a document's number is NaN or infinite"
    if len(set(scores)) == 1:
        return "all documents have the same number"
    return "it is no mean of the documents' numbers"


def _named(keys: Sequence[ScoreKey], data: RunData) -> Iterator[str]:
    for task, metric, _ in dict.fromkeys((k[0], k[1], "") for k in keys):
        yield f"{task} {metric}" if len(data.tasks) > 1 else metric


def metrics_section(page: Page, data: RunData) -> None:
    """Every metric with its interval; of many metrics, the tasks of each group are folded below the groups."""
    listed = list(in_groups(data.results))  # groups above their own; in a circle of groups, as the results are
    listed += dict.fromkeys((key[0], 0) for key in data.run.results if key[0] not in {name for name, _ in listed})
    keys = [(key, depth) for name, depth in listed for key in data.run.results if key[0] == name]
    rows = {key: _row(data, key, depth) for key, depth in keys}
    # One task needs no name; runs of lm-eval may lack some of these columns, and mostly nothing is cut.
    several = len({key[0] for key in rows}) > 1
    filled = [n for n in range(len(HEAD)) if any(row[n] != "" for row in rows.values()) and (n or several)]
    numbers = [n for n, place in enumerate(filled) if HEAD[place] not in WORDS]

    def drawn(own: Iterable[ScoreKey]) -> Node:
        cells = [[rows[key][n] for n in filled] for key in own]
        return parts.table([HEAD[n] for n in filled], cells, numbers, about=ABOUT)

    groups = data.run.groups
    leaf = {task for tasks in groups.values() for task in tasks if task not in groups} if len(rows) > MOST else set()
    body = [drawn(key for key in rows if key[0] not in leaf)]
    for name, tasks in groups.items() if leaf else ():
        if own := [key for key in rows if key[0] in {*tasks} - {*groups}]:
            body.append(parts.details(f"{name}: {counted(len({*tasks} - {*groups}), 'task')}", drawn(own)))
    has_interval = {key: metric_interval(data.run, key) is not None for key in rows}
    page.section("metrics", "Metrics", *body, note=interval_note(data, has_interval) or None)


def is_share(data: RunData, key: ScoreKey) -> bool:
    """Whether a metric is a share of documents, or a mean of such shares."""
    return all(data.binary(part) for part in [part for part, _ in members(data.run, key)] or [key])


def _row(data: RunData, key: ScoreKey, depth: int) -> list[Node]:
    value, error = data.run.results[key]
    arrow = {True: "up", False: "down", None: None}[data.run.higher_is_better.get(key)]
    bounds, cut = metric_interval(data.run, key), cut_of(data.run, key)
    drawn = parts.interval(value, *bounds, (0.0, 1.0)) if bounds and is_share(data, key) else ""
    documents = group_documents(data.run, key) or len(data.samples.get(key[0], {}))
    shortened: list[Node] = ["", "", ""]
    if cut is not None:
        finished = "" if cut.finished is None else f"{cut.finished:.4f}"
        shortened = [parts.percent(cut.count / cut.total), f"{cut.cut:.4f}", finished]
    inner = depth if key[0] in data.run.groups else 0
    return [
        tag("span", key[0], class_=f"depth{min(inner, 3)}") if inner else key[0],
        tag("span", key[1], class_=arrow),
        f"{value:,.4f}",
        tag("span", f"{bounds[0]:,.4f} to {bounds[1]:,.4f}", class_="whole") if bounds else "",
        drawn,
        "" if error is None else f"{error:.4f}",
        f"{documents:,}",
        *shortened,
        key[2],
        str(data.results.get("n-shot", {}).get(key[0], "")),
    ]


def cost_section(page: Page, data: RunData, other: Run | None = None) -> None:
    """Time, throughput, and what the scheduler did; nothing for a run that recorded none.

    other: the run in the other kind of numerics, on the same inputs.
    """
    manifest = data.run.manifest
    if not manifest:
        return
    counts, timings = manifest.counts, manifest.timings
    seconds = timings.run_seconds
    ran = counts.requests - not_run(counts)
    whose = "of the requests that ran" if not_run(counts) else "in all"  # tokens are counted for these alone
    speed: list[tuple[str, Node, Node]] = [
        ("Time", f"{timings.total_seconds:,.1f} s", f"{seconds:,.1f} s of it running")
    ]
    if ran and seconds > 0:
        scored_or_output = f"{manifest.output_kind} tokens".capitalize()
        speed += [
            ("Requests", f"{ran / seconds:,.1f}/s", f"{ran:,} of {counts.requests:,} ran"),
            ("Prompt tokens", f"{counts.prompt_tokens / seconds:,.0f}/s", f"{counts.prompt_tokens:,} {whose}"),
            (scored_or_output, f"{counts.output_tokens / seconds:,.0f}/s", f"{counts.output_tokens:,} {whose}"),
        ]
    speed += list(_against(data.run, other)) if other else []
    title = f"Time and memory, {manifest.numerics} numerics"
    page.section("cost", title, parts.tiles(speed), parts.facts(_schedule(manifest)))


def manifest_section(page: Page, data: RunData) -> None:
    """The run's environment, in short and in full."""
    manifest, run = data.run.manifest, data.run
    short = parts.facts(_short(manifest)) if manifest else parts.facts([("Model", str(data.results.get("model_name")))])
    texts = [(name, json.dumps(value, indent=2, ensure_ascii=False)) for name, value in _wholes(data)]
    whole = [parts.details(f"{name}", tag("pre", text)) for name, text in texts]
    page.section("manifest", "Manifest", short, *whole, note=f"Read from {run.name}." if run.kind != "run" else None)


def _verdict(data: RunData) -> tuple[str, str, bool | None]:
    run, level = data.run, data.run.manifest.numerics
    documents = sum(len(docs) for docs in data.samples.values())
    amounts = f"{counted(documents, 'document')}, {counted(len(run.items), 'request')}. "
    if level == "exact" and "by transformers" in run.manifest.model.architecture:
        text = "Numerics exact, by transformers' module: no batch size, request order, schedule or thread count "
        return "Reproducible bit for bit on one kind of CPU", f"{amounts}{text}changes a bit on one kind of CPU.", True
    if level == "exact":
        text = "Numerics exact: no batch size, request order, schedule, thread count or machine changes a bit."
        return "Reproducible bit for bit", amounts + text, True
    if level == "native":
        where = run.identity.get("gpu_architecture", "this GPU architecture")
        text = "Numerics native: no batch size, request order or schedule changes a bit on this GPU architecture."
        return f"Reproducible bit for bit on {where}", amounts + text, True
    if level == "fast":
        text = "Numerics fast: another batch size, order or machine may change logprobs and answers. "
        text += "batch_invariant=true makes the run reproducible."
        return "Ordinary numerics: bits may depend on the batch", amounts + text, None
    if run.program == "an endpoint":
        return "Answers of an endpoint", f"{amounts}No one can compute an answer again, or check it.", None
    return f"Read from {run.files}", f"{amounts}They hold no tokens, so whether bits repeat is unknown.", None


def _warnings(data: RunData) -> Iterator[str]:
    manifest = data.run.manifest
    items = data.run.items.values()
    cut = sum(item.truncated > 0 for item in items)
    generated = [item for item in items if item.kind == "generate_until"]
    limited = sum(data.endings.get(item.key, ("",))[0] == "length" for item in generated)
    if not data.endings:
        limited = sum(item.doc_id in data.run.cut.get(item.task, ()) for item in generated)
    odd = sum(item.sum_logprob is not None and not math.isfinite(item.sum_logprob) for item in items)
    if odd:
        yield (f"{odd:,} of {counted(len(items), 'request')} hold a logprob that is NaN or infinite: no metric of "
                    "theirs can be trusted.")  # fmt: skip
    if cut:
        yield (f"{cut:,} of {len(items):,} prompts were cut from the left to fit max_model_len.")
    if limited:
        share = f"{limited:,} of {len(generated):,} outputs ({parts.percent(limited / len(generated))})"
        yield (f"{share} ran into the length limit: their answers may be missing.")
    if short := sum(cut for _, cut in data.thinking.values()):
        yield (f"{short:,} of {counted(len(data.thinking), 'generation')} reached the length limit while "
                    f"thinking, so they contain no answer ({credit_words(manifest)}).")  # fmt: skip
    if unended := manifest.counts.unended_thinking:
        yield (f"{counted(unended, 'generation')} stopped before the end of their thinking, so they contain no "
                    f"answer ({credit_words(manifest)}).")  # fmt: skip
    for task, counts in manifest.programs.outcomes.items() if manifest.programs else ():
        total = sum(counts.values())
        yield (f"{task} ran {counted(total, 'generated program')}: {outcome_words(counts)}. Each sample says how "
                    "its program ended; one that ran out of time might pass on a faster machine.")  # fmt: skip
    if manifest.programs and not manifest.programs.isolated:
        yield ("Generated programs ran without isolation: they could reach the network, files and processes.")
    facts = data.results.get("endpoint")
    if isinstance(facts, Mapping) and fits(facts.get("in_words"), list[str]):
        yield from facts["in_words"]
    yield from (f"{line[:1].upper()}{line[1:]}." for line in judge_lines(manifest))
    if manifest.code.dirty:
        yield (f"The code had uncommitted changes (commit {str(manifest.code.commit)[:12]}).")
    if resumed := manifest.counts.resumed_requests:
        yield (f"The run was interrupted and resumed: {resumed:,} answers were resumed; times are of the rest.")
    if cached := manifest.counts.cached_requests:
        yield (f"{cached:,} answers were read from a cache, not computed; times are of the rest.")
    if resumed_fast(manifest):
        yield ("Fast numerics and an interrupted run: its batches were others than those of an unbroken run, so "
                    "the same command may give other bits, and other answers.")  # fmt: skip
    if data.run.unbound:
        yield (f"Of this run, {UNBOUND}.")


def _foremost(data: RunData) -> list[ScoreKey]:
    """The metrics shown large, of the requested ones: tasks and groups that are part of no other group; the first of
    each before any second."""
    seen: Counter[str] = Counter()
    places = {}
    roots = roots_of(data.run.groups, [key[0] for key in data.run.results])
    for key in data.run.results:
        if key[0] in roots:
            places[key] = seen[key[0]]
            seen[key[0]] += 1
    return sorted(places, key=places.__getitem__)[:TILES]


def _interval_words(data: RunData, key: ScoreKey, error: float | None) -> str | None:
    bounds = metric_interval(data.run, key)
    if bounds is None:
        return None if error is None else f"± {error:.4g} stderr"
    if is_share(data, key):
        return f"95 %: {bounds[0] * 100:.1f} to {bounds[1] * 100:.1f}"
    return f"95 %: {bounds[0]:.4g} to {bounds[1]:.4g}"


def _schedule(manifest: Manifest) -> Iterator[tuple[str, Node]]:
    engine, hardware = manifest.engine, manifest.hardware
    yield "Device", f"{', '.join(hardware.gpus) or hardware.cpu} ({engine.device})"
    yield "dtype", engine.dtype
    yield "Loading", f"{manifest.timings.load_seconds:,.1f} s"
    if stats := engine.stats:
        most = f"{stats.largest_batch:,} requests and {stats.largest_step:,} tokens"
        yield "Steps", f"{stats.num_steps:,}, at most {most} at once"
        total = stats.num_computed_tokens + stats.num_cached_tokens
        yield "Prefix cache", f"{stats.num_cached_tokens:,} of {total:,} prompt and output tokens came from it"
        yield "Preemptions", f"{stats.num_preemptions:,}"
        if stats.num_guesses:
            yield "Guessed tokens", f"{stats.num_right_guesses or 0:,} of {stats.num_guesses:,} were right"


def _against(run: Run, other: Run) -> Iterator[tuple[str, Node, Node]]:
    """How many times as long as the other run's requests took; only for whole runs of equal work on one machine."""
    runs = (run.manifest, other.manifest)
    done = [(m.hardware, m.counts.requests, not_run(m.counts)) for m in runs]
    times = [m.timings.run_seconds for m in runs]
    if done[0] == done[1] and not done[0][2] and min(times) > 0:
        level = other.manifest.numerics
        yield f"Time over {level}'s", f"{times[0] / times[1]:.2f}", f"{level} ran for {times[1]:,.1f} s"


def _short(manifest: Manifest) -> Iterator[tuple[str, Node]]:
    model, code, hardware = manifest.model, manifest.code, manifest.hardware
    yield (
        "Model",
        f"{model.name} ({model.architecture}, {model.num_parameters:,} parameters, {model.format})",
    )
    yield "Weights", tag("code", model.weights_sha256)
    if model.adapter:
        at = f" at {model.adapter['revision']}" if model.adapter.get("revision") else ""
        yield "Adapter, merged", f"{model.adapter.get('source')}{at}, sha256 {str(model.adapter.get('sha256'))[:12]}…"
    rows = list(_rows(manifest))
    many = len(rows) > MANY_ROWS
    yield from [("Rows", parts.details(f"Those of {len(rows)} tasks", parts.facts(rows)))] if many else rows
    dirty = ", with uncommitted changes" if code.dirty else ""
    commit = f"commit {str(code.commit)[:12]}{dirty}"
    yield "Code", f"evalengine {code.version}, contract {manifest.contract_version}, {commit}"
    yield "Machine", f"{hardware.cpu}, {hardware.cpu_count} cores; {', '.join(hardware.gpus) or 'no GPU used'}"
    versions = manifest.libraries
    yield "Python", f"{manifest.python}; torch {versions.get('torch')}, transformers {versions.get('transformers')}"


def _rows(manifest: Manifest) -> Iterator[tuple[str, Node]]:
    for task, dataset in manifest.datasets.items():
        names = (dataset.dataset, dataset.name, dataset.split)
        local = dataset.revision is None and dataset.source  # rows of the Hub have a commit
        where = f"{dataset.source}" if local else " ".join(part for part in names if part)
        yield f"Rows of {task}", f"{where}, {dataset.rows:,} rows, sha256 {str(dataset.sha256)[:12]}…"


def _wholes(data: RunData) -> Iterator[tuple[str, Any]]:
    if data.run.manifest:
        for name in ("identity", "engine", "datasets", "libraries"):
            yield name, data.run.manifest.content[name]
        yield "manifest.json, whole", data.run.manifest.content
    else:
        yield "what the results say", data.run.identity


TASKS = 4  # most tasks that the title names


def write_run_report(folder: str | Path, target: Path | None = None) -> tuple[Path, int]:
    """Writes the page of a finished run (default: into its folder); returns (file, bytes).

    Raises `ConfigError` for a run that cannot be read, `EvalEngineError` if the disk refuses.
    """
    data = load_run_data(folder, page=target is not None)  # an edited page may be written anew
    path = target or data.run.folder / PAGE
    return path, run_page(data, sibling(data.run)).write(path, data.run.manifest)


def run_page(data: RunData, other: Run | None = None) -> Page:
    """The page of one run. other: the run in the other kind of numerics that its noise floor is measured against."""
    page = Page(_title(data), scripts=("samples.js",))
    with_passes = with_pass_at_k(data.run)
    scored = data if with_passes is data.run else replace(data, run=with_passes)  # which reads the samples again
    summary_lead(page, scored)
    metrics_section(page, scored)
    if other is not None:
        noise_floor_section(page, noise_floor(data.run, other))
    distributions_section(page, data)
    likelihood_section(page, data)
    samples_section(page, data)
    cost_section(page, data, other)
    manifest_section(page, data)
    return page


def _title(data: RunData) -> str:
    model = data.run.manifest.model.name or data.results.get("model_name") or data.run.name
    names = roots_of(data.run.groups, [*dict.fromkeys(key[0] for key in data.run.results)]) or data.tasks
    title = ", ".join(names) if len(names) <= TASKS else f"{len(data.tasks)} tasks"
    return f"{title} on {model}"
