"""Runs one scheduled step: puts it into integers, has the ranks compute it, and takes its results.

T tokens in the step, n rows of it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.execute.batch import Batch, LogitsRequests, NextToken, Pending, Result, SequenceShare
from evalengine.engine.execute.cuda_graphs import Decoded, PendingTokens
from evalengine.engine.execute.parallel.ranks import Ranks
from evalengine.engine.execute.processing import forbid, penalise
from evalengine.engine.execute.rank_runner import Culprits, RankRunner
from evalengine.engine.execute.read_out import DeviceResults
from evalengine.engine.execute.sharing import Sharing
from evalengine.engine.schedule.scheduler import Chunk, SchedulerOutput
from evalengine.engine.schedule.sequence import Generating, Status
from evalengine.kernels import sampling
from evalengine.layers.metadata import Download, upload
from evalengine.layers.ops import Ops


@dataclass(frozen=True)
class Launched:
    """A step that is being computed, or is done."""

    chunks: list[Chunk]  # in the order of the batch's rows
    results: PendingTokens | Pending

    @property
    def needs_the_host(self) -> bool:
        """Whether a step that follows cannot be launched before the host knows this one's tokens."""
        chunks = [chunk for chunk in self.chunks if chunk.seq.status is Status.RUNNING]
        processed = (isinstance(c.seq, Generating) and c.seq.processing is not None for c in chunks)
        return any(chunk.guesses for chunk in chunks) or any(processed)


class ModelRunner(RankRunner):
    """Rank 0's runner: it has the sequences, and tells the other ranks of each step before it computes its own part.

    ranks: the other ranks.
    """

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._sharing = None if self.least_saved is None else Sharing(self.block_size, self.least_saved)
        self.num_graph_steps = self.num_cascade_steps = 0
        self.is_asynchronous = self.ops.device.type == "cuda"  # a step computes while the host prepares the next
        self._last_step: torch.cuda.Event | None = None
        # Called with every step before it runs, the chunks in the order of the batch's rows, so that the user of an
        # `op_hook` can tell which rows belong to which sequence.
        self.on_batch: Callable[[SchedulerOutput], None] | None = None

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures the decode steps of the usual sizes and lengths now, where this level and device have CUDA graphs,
        while there is memory for them."""
        if self.graphs is not None:
            with self._after_the_last_step():
                for key in self.graphs.usual_keys():
                    self._ranks.broadcast("capture", *key)
                    try:
                        captured = self.capture(*key)
                    except BaseException as error:
                        self._ranks.end_after(error)
                        raise
                    if not captured:
                        return

    def fill_pool(self, value: float) -> None:
        """Fills every rank's pools with one number, so that a slot which is read before it is written shows."""
        self._ranks.broadcast("fill", value)
        self.fill_pools(value)

    @property
    def can_launch_ahead(self) -> bool:
        """Whether a step may be launched before the results of the last one are taken."""
        return self.is_asynchronous and self.on_batch is None

    @torch.inference_mode()
    def launch(self, schedule: SchedulerOutput) -> Launched:
        """Starts a step. The host waits only for the tokens that logits processors must know."""
        try:
            with self._after_the_last_step():
                return self._launch(schedule)
        except BaseException:
            if self.graphs is not None:
                self.graphs.forget()
            raise

    @contextmanager
    def _after_the_last_step(self) -> Iterator[None]:
        """Orders the step after the last one on the device: the caller's current stream may have changed in between."""
        if self.ops.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.ops.device)
        if self._last_step is not None:
            stream.wait_event(self._last_step)
        try:
            yield
        finally:  # recorded for a step that fails, too: its kernels may still be writing to pages
            self._last_step = stream.record_event(self._last_step)

    def _launch(self, schedule: SchedulerOutput) -> Launched:
        chunks = sorted(schedule.chunks, key=_place)
        if schedule.state_copies:
            self._ranks.broadcast("copy_states", schedule.state_copies)
            self.copy_states(schedule.state_copies)
        copies = schedule.copies
        observed = self.on_batch is not None  # a listener wants every op's output, and a replayed graph runs no hooks
        if self.on_batch is not None:
            self.on_batch(SchedulerOutput(chunks, schedule.copies))
        shared = None if self._sharing is None else self._sharing.of(chunks)
        if self.graphs is not None and not observed and (step := self.graphs.plan(chunks, shared)) is not None:
            requests = None if all(_wants_argmax(c) for c in chunks) else LogitsRequests(chunks)
            wanted = None if requests is None else requests.indices
            self._ranks.broadcast("replay", copies, step, wanted)
            replayed = self.replay(copies, step, wanted, None if requests is None else self._choose(requests))
            if replayed is not None:
                self.num_graph_steps += 1
                self.num_cascade_steps += step.cascade
                return self._replayed(chunks, requests, *replayed)
            copies = []
        self.num_cascade_steps += shared is not None
        requests, batch = LogitsRequests(chunks), Batch.of(chunks, shared)
        self._ranks.broadcast("compute", copies, batch, requests.indices)
        return self._pending(chunks, requests, self.compute(copies, batch, requests.indices, self._choose(requests)))

    def _choose(self, requests: LogitsRequests) -> Callable[[slice, Tensor], Tensor]:
        """The function that chooses some of the step's sampled tokens (`read_out.Choose`)."""
        return lambda which, scores: _chosen(self.ops, requests.choosing[which], scores)

    def _replayed(
        self, chunks: list[Chunk], requests: LogitsRequests | None, decoded: Decoded, results: DeviceResults | None
    ) -> Launched:
        if requests is not None:
            return self._pending(chunks, requests, results)
        for row, chunk in enumerate(chunks):
            chunk.seq.device_row = row
        return Launched(chunks, decoded.greedy)

    def _pending(self, chunks: list[Chunk], requests: LogitsRequests, results: DeviceResults | None) -> Launched:
        for row, (_, seq) in enumerate(requests.generating):
            seq.device_row = row
        tensors, tops = ([], []) if results is None else (results.tensors, results.tops)
        return Launched(chunks, Pending(requests, Download(tensors, self.ops.device), [top.rows for top in tops]))

    @torch.inference_mode()
    def results(self, launched: Launched) -> list[Result]:
        """The results of a step's sequences that still run: a token of the step before may have ended one since."""
        pending = launched.results
        results = pending.results() if isinstance(pending, Pending) else _of_argmax(launched.chunks, pending)
        self._ranks.check()  # a wait that ended because a rank died has fetched rubbish
        self._explain_non_finite([c for c in launched.chunks if _runs(c)], results)
        return results

    def _explain_non_finite(self, chunks: list[Chunk], results: list[Result]) -> None:
        """Names, for every row whose logprobs are NaN, the first op whose output was not finite there.

        The step is computed again to find it. If that gives finite numbers, no op and no weight is to blame, and naming
        one would mislead (it did, for a race in a kernel), so the message says that the step is finite now.
        """
        bad = [(r, p) for r in results if (p := _first_bad(r, self.spec.vocab_size)) is not None]
        if not bad:
            return
        if self.spec.recurrences:  # the step cannot be computed again: its states have gone on
            for result, position in bad:
                result.error = f"not a finite number at token {position}"
            return
        places = [(c.seq.seq_id, p) for c in chunks for p in range(c.start, c.end)]  # of each row of the batch
        row_of = {place: row for row, place in enumerate(places)}
        rows = [row_of[result.seq.seq_id, position] for result, position in bad]
        culprits, finite = self._again(Batch.of(chunks), rows)
        for (result, position), row, is_finite in zip(bad, rows, finite, strict=True):
            if row not in culprits and is_finite:
                cause = "the step, computed again, is finite: a bug of a kernel or a fault of the machine; report it"
            else:
                cause = f"first in the output of {culprits.get(row, (0, 'lm_head'))[1]}"
            result.error = f"not a finite number at token {position}: {cause}"

    def _again(self, batch: Batch, rows: list[int]) -> tuple[Culprits, list[bool]]:
        """The step computed again by all ranks: each row's first op that was not finite on any rank, and whether these
        rows' logits are finite."""
        answers = self._ranks.on_all_ranks("explain", (batch, rows), lambda: explain(self, batch, rows))
        culprits: Culprits = {}
        for row in rows:
            if first_ops := [of_rank[row] for of_rank, _ in answers if row in of_rank]:
                culprits[row] = min(first_ops)
        return culprits, [all(of_row) for of_row in zip(*(finite for _, finite in answers), strict=True)]


def explain(runner: RankRunner, batch: Batch, rows: list[int]) -> tuple[Culprits, list[bool]]:
    """One rank's part of `ModelRunner._again`: the first op of each row that was not finite, and whether the logits of
    `rows` are finite."""
    culprits, hidden = runner.culprits(batch)
    finite = [bool(runner.model.compute_logits(hidden[row : row + 1]).isfinite().all()) for row in rows]
    return culprits, finite


def _chosen(ops: Ops, choosing: list[tuple[SequenceShare, Generating]], scores: Tensor) -> Tensor:
    """The next tokens, int64 [n], of rows that do not simply take the most probable one: their temperature is positive,
    or processors come before the choice.

    scores: a copy of the rows' logits, float32 [n, V]; overwritten.
    """
    states = [seq.processing for _, seq in choosing]
    for (_, seq), state in zip(choosing, states, strict=True):
        if state is not None:
            state.advance(seq.token_ids)
            seq.error = state.nothing_left(scores.shape[1])
    penalise(scores, states)
    logprobs = ops.log_softmax(scores)
    forbid(logprobs, states)
    sampled = [row for row, (_, seq) in enumerate(choosing) if seq.request.params.temperature > 0]
    if len(sampled) == len(choosing):
        return _sample(ops, choosing, logprobs)
    tokens = sampling.argmax_lowest(logprobs)
    if sampled:
        (rows,) = upload([np.array(sampled)], ops.device)
        tokens[rows] = _sample(ops, [choosing[row] for row in sampled], logprobs[rows])
    return tokens


def _sample(ops: Ops, choosing: list[tuple[SequenceShare, Generating]], logprobs: Tensor) -> Tensor:
    """A sampled token of each row, int64 [n], by its request's temperature, top-k, top-p and noise.

    logprobs: float32 [n, V].
    """
    params = [seq.request.params for _, seq in choosing]
    keys = np.array([seq.noise_key for _, seq in choosing], dtype=np.int64)
    # The position that each new token will have.
    positions = np.array([part.positions.stop for part, _ in choosing], dtype=np.int64)
    return sampling.sample(
        logprobs,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        *upload([keys, positions], ops.device),
    )


def _of_argmax(chunks: list[Chunk], unread: PendingTokens) -> list[Result]:
    """The results of decodes that want no more than their most probable token."""
    results: list[Result] = []
    for chunk, (token, logprob) in zip(chunks, unread.read(), strict=True):
        if _runs(chunk):
            assert isinstance(chunk.seq, Generating)
            results.append(NextToken(chunk.seq, chunk.start, token, token, logprob))
    return results


def _first_bad(result: Result, vocab_size: int) -> int | None:
    """The first position of a result whose logprobs are NaN; None if there is none."""
    if isinstance(result, NextToken):
        return result.position if result.greedy_id >= vocab_size else None
    bad = np.flatnonzero(result.greedy_ids >= vocab_size)
    return result.positions[int(bad[0])] if len(bad) else None


def _place(chunk: Chunk) -> int:
    """Where a batch has the chunk: decodes first (`AttentionMetadata`), the longest sequence first, so that the GPU is
    full until the end of their attention (`kernels/attention_decode.py`); then prompts, as they were scheduled."""
    return 1 if chunk.end - chunk.start > 1 else -chunk.end


def _runs(chunk: Chunk) -> bool:
    return chunk.seq.status is not Status.FINISHED


def _wants_argmax(chunk: Chunk) -> bool:
    """Whether the most probable token after the chunk and its logprob are wanted, and nothing else."""
    seq = chunk.seq
    at_end = chunk.end >= seq.num_tokens
    return isinstance(seq, Generating) and at_end and seq.takes_argmax and not seq.num_logprobs
