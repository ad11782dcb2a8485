"""An item run again in its run's configuration, or in that with some settings replaced, while a recorder listens.

Two runs may differ because of the requests beside an item in its batches, so the whole run is repeated, in its order
and with its KV pool, until the item is done; `alone` is for runs that are too long for that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evalengine.config.schema import Config
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import files_of, resolve_checkpoint, weights_fingerprint
from evalengine.engine.request import Request, RequestOutput
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.explain.record import ComputationRecorder, in_order
from evalengine.explain.trace import LOGITS, LOGPROB, Computation, Trace
from evalengine.harness.described import engine_settings
from evalengine.harness.plan import Plan
from evalengine.harness.progress import RunProgress
from evalengine.harness.requests import HarnessRequest
from evalengine.harness.same_run import config_again, plan_again
from evalengine.records.manifest import machine_facts
from evalengine.records.schema import RecordKey, ids_sha256
from evalengine.report.compare.weight_tensors import ADAPTED, UNREAD
from evalengine.report.read.run import Run

# Settings that the run resolved by itself, from the machine's memory for instance, and that must be the same again.
RESOLVED = ("device", "num_threads", "max_model_len", "dtype", "block_size", "num_kv_blocks")
ALWAYS = RESOLVED[:3]  # the others follow from settings that may be replaced


@dataclass(frozen=True)
class Side:
    """What to run again."""

    run: Run
    instead: tuple[str, ...] = ()  # settings that this side has instead of the run's ("batch_invariant=false")
    places: tuple[str, ...] = ()  # where rows and weights lie here ("data_dir=/data"), and on which device to run
    alone: bool = False  # the item by itself, without the other requests of the run

    @property
    def label(self) -> str:
        return f"{self.run.name} with {' '.join(self.instead)}" if self.instead else self.run.name


def rerun(side: Side, key: RecordKey, keep: Sequence[int] = ()) -> Trace:
    """Runs `key` again and returns what was heard; outputs at the positions `keep` are stored whatever room they take.

    Raises:
        ConfigError: this machine lacks the run's device, or the rows, the tokenizer or the weights have changed.
        EvalEngineError: the item failed (non-finite activations).
    """
    config = _configuration(side)
    same_model = not _names(side.instead, "model.")
    plan, deferred = plan_again(side.label, side.run.identity, config, side.run.source, same_model)
    with deferred.made() as llm:
        item = next(planned for planned in plan.requests if planned.key == key)
        recorder = ComputationRecorder(item.request, keep)
        output = _run(llm, plan, item, recorder, side, config.progress)
        weights = side.run.identity["weights"] if same_model else weights_fingerprint(llm.checkpoint)
        settings = {**engine_settings(llm), "seed": config.seed, "weights": weights}
        return _trace(side, item, recorder, output, len(plan.requests), settings)


def weight_files_of(side: Side) -> list[Path]:
    """The weights that a side is run again with. Raises ValueError (after "A's weights") if they cannot be compared."""
    checkpoint = resolve_checkpoint(_configuration(side).model)
    if checkpoint.adapter is not None:
        raise ValueError(ADAPTED)
    if checkpoint.format in UNREAD:
        raise ValueError(UNREAD[checkpoint.format])
    return files_of(checkpoint)


def _configuration(side: Side) -> Config:
    """The run's configuration, with what the run resolved by itself pinned."""
    resolved, name = side.run.manifest.engine_settings, side.run.name
    is_fast = side.run.manifest.engine.numerics == "fast"
    names = [*(ALWAYS if side.instead else RESOLVED), *(["attention_backend"] if is_fast and not side.instead else [])]
    config = config_again(side.run.source, {name: resolved[name] for name in names}, (*side.places, *side.instead))
    device = config.engine.device
    if device == resolved["device"] and device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"explain: {name} ran on {device}, which this machine does not have. Where it ran, write a file by "
            "`explain RUN --item ITEM --write FILE`, and compare that: `explain FILE FILE`"
        )
    if is_fast and config.engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"explain: {name} summed over {config.engine.tensor_parallel_size} ranks (numerics=fast), and one process, "
            "which is what can be listened to, gives other bits; explain a run with batch_invariant=true"
        )
    # One op at a time cannot be heard inside a captured graph, on one of several ranks, or in a replica; and what is
    # heard of a guess may be of no token.
    return replace(config, engine=replace(config.engine, enforce_eager=True, tensor_parallel_size=1, speculation="off"))


def _run(
    llm: LLM, plan: Plan, item: HarnessRequest, recorder: ComputationRecorder, side: Side, progress: bool
) -> RequestOutput:
    requests = [item.request] if side.alone else [planned.request for planned in plan.requests]
    with recorder.listening(llm), closing(_answers(llm, requests, side.label, progress)) as outputs:
        output = next(answer for answer in outputs if answer.request_id == item.request.request_id)
    if output.error:
        raise EvalEngineError(f"{side.label}: {output.error}")
    return output


def _answers(llm: LLM, requests: Sequence[Request], label: str, progress: bool) -> Generator[RequestOutput]:
    with RunProgress(f"explain {label}", len(requests), 0, progress) as bar:
        for output in llm.run(requests, bar.step):
            bar.finished()
            yield output


def _trace(
    side: Side,
    item: HarnessRequest,
    recorder: ComputationRecorder,
    output: RequestOutput,
    num_requests: int,
    settings: dict[str, Any],
) -> Trace:
    computations = sorted(recorder.computations, key=lambda x: x.position)  # those of one position stay in time's order
    token_ids = [*item.prompt_ids, *output.token_ids]
    assert {x.position for x in computations} == {*range(len(token_ids) - 1)}, "every token was computed by someone"
    _add_logprobs(computations, len(item.prompt_ids) - 1, output.logprobs)
    return Trace(
        label=side.label,
        key=item.key,
        prompt_sha256=ids_sha256(item.prompt_ids),
        prompt_tokens=len(item.prompt_ids),
        token_ids=token_ids,
        ops={**in_order(recorder.ops), LOGPROB: "float32"},
        computations=computations,
        settings=settings,
        machine=asdict(machine_facts(settings["device"])),
        extent=_extent(side, num_requests),
        reproduced=None if side.instead else _equals_record(side.run, item.key, output),
    )


def _add_logprobs(computations: list[Computation], first: int, logprobs: np.ndarray) -> None:
    """Adds the answer as the last op: the logprob that was read from the logits of each position."""
    for computation in computations:
        number = computation.position - first
        if LOGITS in computation.digests and 0 <= number < len(logprobs):
            computation.take(LOGPROB, logprobs[number : number + 1], keep=True)


def _extent(side: Side, num_requests: int) -> str:
    if side.alone:
        return "the item alone, without the requests that the run had beside it"
    resumed = side.run.manifest.counts.resumed_requests
    other = f"; the run was interrupted after {resumed} requests, so its own batches were others" if resumed else ""
    return f"the run's {num_requests} requests in their batches, until the item was done{other}"


def _equals_record(run: Run, key: RecordKey, output: RequestOutput) -> bool:
    item = run.items[key]
    assert item.logprobs is not None
    return item.output_ids == output.token_ids and item.logprobs.tobytes() == output.logprobs.tobytes()


def _names(settings: Sequence[str], prefix: str) -> bool:
    return any(setting.lstrip("+").startswith(prefix) for setting in settings)
