"""An item run again in its run's configuration, or in that with some settings replaced, while a recorder listens.

Two runs may differ because of the other requests in an item's batches, so the whole run is repeated, in its order
and with its KV pool, until the item is done; `alone` is for runs that are too long for that.

A position of the item may be computed in any step, with any requests, and more than once (preemption); the prefix
cache may hand the item keys and values that another request computed. So the recorder also listens to every other
request that begins with the item's tokens, and remembers which slot of the KV pool holds whose computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evalengine.config.schema import Config
from evalengine.engine.execute.model_runner import ModelRunner
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import files_of, resolve_checkpoint, weights_fingerprint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput
from evalengine.engine.schedule.scheduler import Chunk, SchedulerOutput
from evalengine.engine.schedule.sequence import Sequence as EngineSequence
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.explain.trace import LOGITS, LOGPROB, Computation, Side, Trace
from evalengine.harness.finish import engine_settings
from evalengine.harness.plan import config_again, plan_again
from evalengine.harness.requests import HarnessRequest, Plan
from evalengine.layers.hooks import op_hook
from evalengine.layers.recurrent import HybridCache, States
from evalengine.records.manifest import machine_facts
from evalengine.records.schema import RecordKey, ids_sha256
from evalengine.report.compare.weight_tensors import ADAPTED, UNREAD
from evalengine.util.progress import RunProgress

VALUES_BYTES = 512 << 20  # room for outputs; beyond it, only the positions in `keep` have values
# The names of the outputs of ops that have two.
PARTS = {"rope_table": ("cos", "sin"), "store_kv": ("k", "v"), "choice": ("experts", "weights")}
NORM_PARTS = ("norm", "residual")  # the outputs of a norm

# Settings that the run resolved automatically, from the machine's memory for instance, and that must be the same again.
RESOLVED = ("device", "num_threads", "max_model_len", "dtype", "block_size", "num_kv_blocks")
ALWAYS = RESOLVED[:3]  # the others follow from settings that may be replaced


def rerun(side: Side, key: RecordKey, keep: Sequence[int] = ()) -> Trace:
    """Runs `key` again and returns what was heard; outputs at the positions `keep` are stored whatever room they take.

    Raises:
        ConfigError: this machine lacks the run's device, or the rows, the tokenizer or the weights have changed.
        EvalEngineError: the item failed (non-finite activations).
    """
    config = _configuration(side)
    same_model = not any(setting.lstrip("+").startswith("model.") for setting in side.instead)
    plan, llm = plan_again(side.label, side.run.identity, config, side.run.source, same_model)
    with llm:
        llm.load()
        item = next(planned for planned in plan.requests if planned.key == key)
        recorder = ComputationRecorder(item.request, keep)
        output = _answer(llm, plan, item, recorder, side, config.progress)
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
    """The run's configuration, with automatically resolved settings pinned."""
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


def _answer(
    llm: LLM, plan: Plan, item: HarnessRequest, recorder: ComputationRecorder, side: Side, progress: bool
) -> RequestOutput:
    requests = [item.request] if side.alone else [planned.request for planned in plan.requests]
    with (
        recorder.listening(llm),
        RunProgress(f"explain {side.label}", len(requests), 0, progress) as bar,
        closing(output for output in llm.run(requests, bar.step)) as outputs,  # it ends while the recorder listens
    ):
        for output in outputs:
            bar.finished()
            if output.request_id == item.request.request_id:
                break
    if output.error:
        raise EvalEngineError(f"{side.label}: {output.error}")
    return output


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
    for computation in computations:  # the answer is the last op: the logprob that was read from a position's logits
        number = computation.position - len(item.prompt_ids) + 1
        if LOGITS in computation.digests and 0 <= number < len(output.logprobs):
            computation.take(LOGPROB, output.logprobs[number : number + 1], keep=True)
    recorded, resumed = side.run.items[item.key], side.run.manifest.counts.resumed_requests
    assert recorded.logprobs is not None
    same = recorded.output_ids == output.token_ids and recorded.logprobs.tobytes() == output.logprobs.tobytes()
    batches = f"; the run was interrupted after {resumed} requests, so its own batches were others" if resumed else ""
    return Trace(
        label=side.label,
        key=item.key,
        prompt_sha256=ids_sha256(item.prompt_ids),
        prompt_tokens=len(item.prompt_ids),
        token_ids=token_ids,
        ops={**in_order(recorder.ops), LOGPROB: "float32"},
        computations=computations,
        settings=settings,
        machine=machine_facts(settings["device"]),
        extent="the item alone, without the requests that ran with it"
        if side.alone
        else f"the run's {num_requests} requests in their batches, until the item was done{batches}",
        reproduced=None if side.instead else same,
    )


@dataclass(frozen=True)
class _Row:
    row: int  # its place in the step's batch
    slots: list[int]  # its places in the KV pool, one for each of the layout's block tables
    computation: Computation


class ComputationRecorder:
    """Collects `computations` of the positions of one request, and `ops`, while `listening`."""

    def __init__(self, request: Request, keep: Sequence[int] = ()) -> None:
        """keep: positions whose outputs are stored whatever room they take."""
        self.request_id = request.request_id
        # The tokens that are known to be fed before the request runs.
        self.tokens = (
            list(request.prompt_ids)
            if isinstance(request, GenerateRequest)
            else [*request.context_ids, *request.continuation_ids[:-1]]
        )
        self.keep = frozenset(keep)
        self.computations: list[Computation] = []
        self.ops: dict[str, str] = {}  # op -> dtype, in order
        self._slots: dict[int, Computation] = {}  # slot of the pool, by the first table -> what it holds
        self._collected: set[int] = set()  # id() of each computation in `computations`
        self._alike: dict[int, int] = {}  # sequence -> how many of the item's first tokens it begins with
        self._may_reuse = True
        self._rows: list[_Row] = []  # rows of this step that are heard
        self._wanted: list[tuple[int, Computation]] = []  # (row of lm_head in this step, its computation), the item's
        self._batch = 0  # the number of rows in this step
        self._read = 0  # rows that lm_head has had in this step
        self._kept = 0  # bytes of stored outputs
        self._of_logits: list[tuple[int, Computation]] = []  # the rows that lm_head gave last

    @contextmanager
    def listening(self, llm: LLM) -> Iterator[None]:
        """Every op of `llm` is run separately, unfused, and observed, while the context is open."""
        assert llm.runner is not None, "an open engine"
        runner, ops = llm.runner, llm.runner.ops
        self._may_reuse = llm.config.enable_prefix_caching
        fused, ops.fused = ops.fused, False
        runner.on_batch = lambda schedule: self._begin(schedule, runner)
        try:
            with op_hook(runner.model, lambda name, output: self._hear(name, output, runner)):
                yield
        finally:
            ops.fused, runner.on_batch = fused, None

    # -- a step --------------------------------------------------------------------------------------------------------

    def _begin(self, schedule: SchedulerOutput, runner: ModelRunner) -> None:
        """Chooses which rows of the step are heard."""
        self._copy_pages(schedule.copies, runner.block_size)
        self._rows, self._wanted, self._batch, self._read = [], [], 0, 0
        num_wanted = 0
        # A sequence may serve several requests: the choices of one context share it.
        own = [chunk for chunk in schedule.chunks if self.request_id in chunk.seq.request_ids]
        for chunk in schedule.chunks:
            observed = self._observed(chunk, chunk in own, schedule, runner.block_size)
            self._rows.extend(observed)
            by_position = {row.computation.position: row.computation for row in observed}
            positions = chunk.seq.wanted(chunk.start, chunk.end)
            if chunk in own:
                self._add(row.computation for row in observed)
                self._wanted.extend((num_wanted + number, by_position[p]) for number, p in enumerate(positions))
            num_wanted += len(positions)
            self._batch += chunk.end - chunk.start
        self._slots.update((row.slots[0], row.computation) for row in self._rows)
        for chunk in own:  # last: pages may be shared with a request that computes them in this very step
            if chunk.start == chunk.seq.num_cached_tokens:  # The sequence was just admitted.
                self._take_reused(chunk, runner.block_size)

    def _observed(self, chunk: Chunk, own: bool, schedule: SchedulerOutput, block_size: int) -> list[_Row]:
        end = chunk.end if own else min(chunk.end, self._shared(chunk.seq))
        size = len(schedule.chunks), schedule.num_tokens
        return [
            _Row(
                self._batch + position - chunk.start,
                _slots(chunk, position, block_size),
                Computation(position, *size),
            )
            for position in range(chunk.start, end)
        ]

    def _take_reused(self, chunk: Chunk, block_size: int) -> None:
        """Adds the positions that the prefix cache gave the item, unless the item computed them itself before."""
        for position in range(chunk.seq.num_passed[0] * block_size, chunk.start):
            computation = self._slots.get(_slots(chunk, position, block_size)[0])
            # A slot may be unknown here: a preempted item can be given another request's pages of generated tokens that
            # the item computed itself before. `_slots` may then hold an old computation of another position.
            if computation is not None and computation.position == position and id(computation) not in self._collected:
                computation.reused = True
                self._add([computation])

    def _add(self, computations: Iterable[Computation]) -> None:
        for computation in computations:
            self._collected.add(id(computation))
            self.computations.append(computation)

    def _copy_pages(self, copies: list[tuple[int, int]], block_size: int) -> None:
        """Pages that were copied hold what their sources held, all before any was overwritten."""
        held = [
            (destination * block_size + offset, self._slots[source * block_size + offset])
            for source, destination in copies
            for offset in range(block_size)
            if source * block_size + offset in self._slots
        ]
        self._slots.update(held)

    def _shared(self, seq: EngineSequence) -> int:
        """How many of the item's first tokens another sequence begins with; the cache may give the item their KV."""
        if not self._may_reuse:
            return 0
        if seq.seq_id not in self._alike:
            pairs = zip(seq.token_ids, self.tokens, strict=False)
            self._alike[seq.seq_id] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return self._alike[seq.seq_id]

    # -- an op ---------------------------------------------------------------------------------------------------------

    def _hear(self, name: str, output: Tensor, runner: ModelRunner) -> None:
        if name == LOGITS:
            first, self._read = self._read, self._read + output.shape[0]
            observed = [(row - first, computation) for row, computation in self._wanted if first <= row < self._read]
            self._of_logits = observed
        elif name.startswith("after_head."):  # scales and caps of the same rows
            observed = self._of_logits
        else:
            assert output.shape[0] == self._batch, f"{name}: an output a token"
            observed = [(row.row, row.computation) for row in self._rows]
        if not observed:
            return
        op = _named(name)
        if op.endswith(("store_kv.k", "store_kv.v")):  # the pool holds the values rounded to its dtype
            layer = int(op.split(".")[2])
            cache = runner.kv_caches[layer]
            pools = cache.kv if isinstance(cache, HybridCache) else cache
            assert not isinstance(pools, States), "the layer has attention"
            output = pools[op.endswith(".v")].flatten(0, 1)  # [slots, Hkv, D]
            observed = [(row.slots[runner.table_of[layer]], row.computation) for row in self._rows]
        if not output.is_floating_point():
            output = output.float()  # the numbers of experts
        self.ops.setdefault(op, str(output.dtype).removeprefix("torch."))
        rows = output[torch.tensor([row for row, _ in observed], device=output.device)]
        assert rows.dtype in (torch.float32, torch.bfloat16, torch.float16), f"{rows.dtype} does not widen to float32"
        widened: np.ndarray = rows.detach().float().cpu().reshape(len(rows), -1).numpy()  # [n, H]
        for (_, computation), values in zip(observed, widened, strict=True):
            keep = computation.position in self.keep or self._kept + values.nbytes <= VALUES_BYTES
            self._kept += values.nbytes if keep else 0
            computation.take(op, values.copy() if keep else values, keep)


def _slots(chunk: Chunk, position: int, block_size: int) -> list[int]:
    page, offset = divmod(position, block_size)
    return [table[page] * block_size + offset for table in chunk.seq.block_tables]


def in_order(ops: dict[str, str]) -> dict[str, str]:
    """The ops as they ran, but each residual sum before its norm: the fused op reports both at once."""
    names = list(ops)
    for index in range(len(names) - 1):
        if names[index].endswith(f".{NORM_PARTS[0]}") and names[index + 1].endswith(f".{NORM_PARTS[1]}"):
            names[index], names[index + 1] = names[index + 1], names[index]
    return {name: ops[name] for name in names}


def _named(name: str) -> str:
    """The name of an output that the hook numbers."""
    stem, _, number = name.rpartition(".")
    if not number.isdigit() or stem == "after_head":  # these are ops in turn
        return name
    parts = PARTS.get(stem.rpartition(".")[2], NORM_PARTS)
    group, part = divmod(int(number), len(parts))  # a model with several RoPEs has a cos and a sin of each
    return f"{stem}.{parts[part]}{group or ''}"
