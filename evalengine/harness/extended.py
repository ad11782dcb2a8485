"""`resume=RUN` of a finished run with a longer `max_gen_toks`: what it answered is kept, what was cut goes on.

A token's bits are a function of the tokens before it, so that an answer which goes on from where the limit cut it is
that of a run which had the longer limit from the start. Everything else must be equal: the model, the rows, every
prompt, and how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evalengine.config.schema import Config
from evalengine.engine.protocol import EngineProtocol
from evalengine.engine.request import GenerateRequest
from evalengine.errors import ConfigError, first_of
from evalengine.harness.asked import SERVED
from evalengine.harness.plan import Plan
from evalengine.plain_text import warn
from evalengine.records.differences import differences
from evalengine.records.evidence import open_run
from evalengine.records.folder import DIGEST, IDENTITY, RECORDS
from evalengine.records.schema import Answer, Answers, RecordKey, read_records

LENGTH = "max_gen_toks"  # the setting of a generation that may differ


@dataclass(frozen=True)
class Earlier:
    """What a finished run leaves for one with longer answers."""

    whole: Answers  # answers that are those of this run, too
    begun: Answers  # answers that the limit cut


def continued(
    config: Config, plan: Plan, identity: Mapping[str, Any], llm: EngineProtocol
) -> tuple[Plan, str, Answers]:
    """(the plan, what `resume` means for its folder, the answers that are known): where `resume` names a finished run,
    cut answers begin with what is known of them, and the run has a folder of its own. Raises as `earlier_answers`."""
    folder = Path(config.resume)
    if config.resume in ("auto", "never") or not (folder / DIGEST).exists() or (folder / IDENTITY).exists():
        return plan, config.resume, {}
    earlier = earlier_answers(folder, config, plan, identity, llm)
    warn(f"going on from {folder}: {len(earlier.whole)} answers are kept, {len(earlier.begun)} were cut")
    return going_on(plan, earlier), "auto", earlier.whole


def earlier_answers(
    folder: Path, config: Config, plan: Plan, identity: Mapping[str, Any], llm: EngineProtocol
) -> Earlier:
    """What the finished run in `folder` answered of the plan.

    Raises ConfigError for a run that is another but for its length, and for one whose limit is no shorter.
    """
    named = f"resume={folder}"
    manifest = open_run(folder, page=False, judge=False)
    problems = list(_problems(config, llm))
    before, now = _without_length(manifest.identity), _without_length(identity)
    if changes := list(differences(before, now)):
        problems.append(f"it is another run: {'; '.join(first_of(changes, 5))}. Only {LENGTH} may differ")
    if problems:
        raise ConfigError([f"{named}: {problem}" for problem in problems])
    rows = {row.key: row for row in read_records(folder / RECORDS)}
    whole: dict[RecordKey, Answer] = {}
    begun: dict[RecordKey, Answer] = {}
    longest = 0
    for item in plan.requests:
        row, request = rows.get(item.key), item.request
        if row is None or list(row.prompt_ids) != list(item.prompt_ids):
            raise ConfigError(f"{named}: it has no answer to this prompt of {item.key[0]}, document {item.key[1]}: a "
                              f"longer {LENGTH} leaves a long prompt less room; raise engine.max_model_len, or set "
                              "resume=auto")  # fmt: skip
        if isinstance(request, GenerateRequest) and row.finish_reason == "length":
            room = min(request.params.max_tokens, llm.settings.max_model_len - len(request.prompt_ids))
            longest = max(longest, len(row.output_ids) - room)
            if len(row.output_ids) < room:
                begun[item.key] = row
                continue
        whole[item.key] = row
    if longest > 0:
        raise ConfigError(f"{named}: its answers are longer than this run's may be; raise task.generation.{LENGTH}")
    return Earlier(whole, begun)


def going_on(plan: Plan, earlier: Earlier) -> Plan:
    """The plan, whose cut answers begin with what is known of them."""
    requests = []
    for item in plan.requests:
        begun = earlier.begun.get(item.key)
        if begun is not None and isinstance(item.request, GenerateRequest):
            item = replace(item, request=replace(item.request, begun=begun))
        requests.append(item)
    return replace(plan, requests=requests)


def _problems(config: Config, llm: EngineProtocol) -> list[str]:
    problems = []
    if llm.settings.numerics == "fast":
        problems.append(
            "numerics=fast: its bits depend on the batch, so that no answer can be continued; set resume=auto"
        )
    if config.logprobs is not None:
        problems.append("logprobs: alternatives are not continued; leave it out, or set resume=auto")
    if llm.spec.short_positions(llm.settings.max_model_len):
        problems.append(
            "the model's positions depend on how long an answer may be: no answer is the beginning of a "
            "longer one; set resume=auto"
        )
    if config.sequential.step is not None:
        problems.append("sequential: a run in steps begins anew; set resume=auto")
    return problems


def _without_length(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without the limits of its answers, without the hash of the requests, which holds them too, and
    without how unfinished thinking is scored: all answers are scored again, and older runs do not say it."""
    left_out = ("prompts", "harness", "score_unfinished_thinking")
    plain = {name: value for name, value in identity.items() if name not in left_out}
    if identity.get("harness") == SERVED:
        raise ConfigError("resume: a server's run is asked by its clients; give the folder of a run of tasks")
    tasks = {}
    for name, task in (plain.get("tasks") or {}).items():
        generation = {key: value for key, value in (task.get("generation") or {}).items() if key != LENGTH}
        tasks[name] = {**task, "generation": generation}
    return {**plain, "tasks": tasks}
