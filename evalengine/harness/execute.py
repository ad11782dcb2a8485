"""Running a plan's requests: what the journal already has is skipped, what finishes is journaled at once."""

from __future__ import annotations

from collections.abc import Mapping

from evalengine.engine.llm import LLM
from evalengine.engine.request import RequestOutput
from evalengine.errors import EvalEngineError
from evalengine.harness.journal import Journal, JournalEntry
from evalengine.harness.plan import Plan
from evalengine.harness.progress import RunProgress
from evalengine.harness.requests import HarnessRequest
from evalengine.records.folder import RunFolder
from evalengine.records.schema import RecordKey, ids_sha256

MAX_LISTED = 10


def execute(
    plan: Plan, llm: LLM, folder: RunFolder, label: str, progress: bool
) -> tuple[Mapping[RecordKey, JournalEntry], set[RecordKey]]:
    """Every request's answer, and the keys of those that ran now (the others come from the journal).

    Raises EvalEngineError, once all others are done and journaled, if a request failed.
    """
    with Journal.open(folder.journal) as journal:
        todo = {item.request.request_id: item for item in plan.requests if not _is_done(item, journal)}
        failed = []
        with RunProgress(label, len(plan.requests), len(plan.requests) - len(todo), progress) as bar:
            for output in llm.run([item.request for item in todo.values()], bar.step):
                item = todo[output.request_id]
                if output.error:
                    failed.append(f"{item.key[0]}, document {item.key[1]}, request {item.key[2]}: {output.error}")
                else:
                    journal.append(_entry(item, output))
                bar.finished()
        if failed:
            more = [f"... and {len(failed) - MAX_LISTED} more"] if len(failed) > MAX_LISTED else []
            raise EvalEngineError("\n".join([f"{len(failed)} requests failed:", *failed[:MAX_LISTED], *more]))
        return journal.finished, {item.key for item in todo.values()}


def _is_done(item: HarnessRequest, journal: Journal) -> bool:
    entry = journal.finished.get(item.key)
    return entry is not None and entry.prompt_sha256 == ids_sha256(item.prompt_ids)


def _entry(item: HarnessRequest, output: RequestOutput) -> JournalEntry:
    return JournalEntry(
        key=item.key,
        prompt_sha256=ids_sha256(item.prompt_ids),
        output_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        text=output.text,
        is_greedy=output.is_greedy,
    )
