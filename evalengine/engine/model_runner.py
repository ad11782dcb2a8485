"""Runs one scheduled step on the device: builds the ragged batch, runs the model, turns wanted logits into numbers.

    T tokens in the step, n wanted positions, V vocabulary.

Only the wanted positions go through lm_head, a slice of rows at a time, so that [n, V] logits never exist at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evalengine.engine.cuda_graphs import DecodeGraphs, Unread
from evalengine.engine.processing import NOTHING_LEFT, forbid, penalise
from evalengine.engine.scheduler import Chunk, Schedule
from evalengine.engine.sequence import Sequence, Status
from evalengine.kernels import sampling
from evalengine.layers.hooks import op_hook
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import GREEDY, Ops
from evalengine.models.config import ModelSpec
from evalengine.models.decoder import DecoderForCausalLM

# Of one slice of logits. lm_head's weights are read once a slice (1.2 GB for Qwen3-8B, 0.3 ms of an H200), so slices
# are large where memory is; a CPU's caches like small ones. CUDA's is that of kernels/verify.py, which compares them.
LOGITS_BYTES, CPU_LOGITS_BYTES = 512 << 20, 64 << 20


@dataclass
class PositionResult:
    """What one wanted position gave. `tokens` are the chosen token (generation) or the targets' (scoring)."""

    seq: Sequence
    position: int
    greedy_id: int
    tokens: list[tuple[int, float]]  # token id, logprob
    top: dict[int, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Launched:
    """A step on its way, or done."""

    chunks: list[Chunk]  # in the order of the batch's rows
    results: Unread | list[PositionResult]

    @property
    def is_unread(self) -> bool:
        return isinstance(self.results, Unread)


class ModelRunner:
    def __init__(
        self,
        model: DecoderForCausalLM,
        spec: ModelSpec,
        ops: Ops,
        num_blocks: int,
        block_size: int,
        graphs_for: tuple[int, int] | None = None,
    ) -> None:
        """graphs_for: (sequences, tokens of one) at most, to replay decode steps as CUDA graphs; None: never."""
        self.model = model
        self.spec = spec
        self.ops = ops
        self.block_size = block_size
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_pool = torch.empty(shape, dtype=ops.dtype, device=ops.device)
        self.kv_caches = [(layer[0], layer[1]) for layer in self.kv_pool]
        self.rows_per_slice = rows_per_slice(spec.vocab_size, ops.device)
        self.graphs: DecodeGraphs | None = None
        if graphs_for is not None and ops.capturable:
            seqs, tokens = min(graphs_for[0], self.rows_per_slice), graphs_for[1]  # one slice: compared at start
            sizes = {"block_size": block_size, "max_num_seqs": seqs, "max_model_len": tokens}
            self.graphs = DecodeGraphs(model, ops, self.kv_caches, **sizes)
        self.num_graph_steps = 0
        self._last_step: torch.cuda.Event | None = None
        # told of every step before it runs, its chunks in the order of the batch's rows: what `op_hook` shows whom
        self.on_batch: Callable[[Schedule], None] | None = None

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> Launched:
        """Starts a step. A replayed graph whose every sequence wants just its most probable token is not waited for."""
        with self._after_the_last_step():
            return self._launch(schedule)

    @contextmanager
    def _after_the_last_step(self) -> Iterator[None]:
        """On the device: the caller's current stream may be another one than it was."""
        if self.ops.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.ops.device)
        if self._last_step is not None:
            stream.wait_event(self._last_step)
        yield
        self._last_step = stream.record_event(self._last_step)

    def _launch(self, schedule: Schedule) -> Launched:
        self._copy_pages(schedule.copies)
        chunks = sorted(schedule.chunks, key=lambda c: c.end - c.start > 1)  # decodes first: see AttentionMetadata
        heard = self.on_batch is not None  # by somebody who listens to every op: a replayed graph calls none
        if self.on_batch is not None:
            self.on_batch(Schedule(chunks, schedule.copies))
        if self.graphs is not None and not heard and (decoded := self.graphs.run(chunks)) is not None:
            self.num_graph_steps += 1
            if all(_wants_greedy(c) for c in chunks):
                return Launched(chunks, decoded.greedy)
            return Launched(chunks, self._in_slices(chunks, decoded.hidden))
        return Launched(chunks, self._in_slices(chunks, self._forward(chunks)))

    @torch.inference_mode()
    def results(self, launched: Launched) -> list[PositionResult]:
        """Of a step's sequences that still run: one may have ended since, by a token of the step before."""
        results = launched.results
        if isinstance(results, Unread):
            rows = zip(launched.chunks, results.read(), strict=True)
            results = [PositionResult(c.seq, c.start, pair[0], [pair]) for c, pair in rows if _runs(c)]
        self._explain_non_finite([c for c in launched.chunks if _runs(c)], results)
        return results

    def can_launch_ahead(self, seqs: list[Sequence]) -> bool:
        """Whether the next token of each can be computed before its last one is known here: on the device it is."""
        longest = max(seq.num_computed_tokens for seq in seqs) + 1
        return self.graphs is not None and self.graphs.has(len(seqs), longest)

    def _in_slices(self, chunks: list[Chunk], hidden: Tensor) -> list[PositionResult]:
        """The wanted positions' results, from the batch's hidden states [T, H]."""
        wanted, rows = self._wanted(chunks)
        results: list[PositionResult] = []
        for i in range(0, len(wanted), self.rows_per_slice):
            part = slice(i, i + self.rows_per_slice)
            results.extend(self._read_out(wanted[part], self.model.compute_logits(hidden[rows[part]])))
        return results

    # -- the batch ---------------------------------------------------------------------------------------------------

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        ids: list[int] = []
        positions: list[int] = []
        for c in chunks:
            ids.extend(c.seq.token_ids[c.start : c.end])
            positions.extend(range(c.start, c.end))
        input_ids, where = (torch.tensor(x, dtype=torch.int64, device=self.ops.device) for x in (ids, positions))
        return self.model(input_ids, where, self.kv_caches, self._metadata(chunks))

    def _metadata(self, chunks: list[Chunk]) -> AttentionMetadata:
        return AttentionMetadata.build(
            [c.end - c.start for c in chunks],
            [c.end for c in chunks],
            [c.seq.block_table for c in chunks],
            self.block_size,
            self.ops.device,
        )

    def _wanted(self, chunks: list[Chunk]) -> tuple[list[tuple[Sequence, int]], Tensor]:
        """The wanted positions (sequence, position), and the batch's rows that hold them, int64 [n]."""
        wanted: list[tuple[Sequence, int]] = []
        rows: list[int] = []
        first = 0
        for c in chunks:
            positions = c.seq.wanted_positions(c.start, c.end)
            wanted.extend((c.seq, p) for p in positions)
            rows.extend(first + p - c.start for p in positions)
            first += c.end - c.start
        return wanted, torch.tensor(rows, dtype=torch.int64, device=self.ops.device)

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            source, destination = (torch.tensor(x, device=self.ops.device) for x in zip(*copies, strict=True))
            for layer in self.kv_pool:  # one by one: what is being copied lies in memory twice
                layer[:, destination] = layer[:, source]

    # -- reading results ---------------------------------------------------------------------------------------------

    def _read_out(self, wanted: list[tuple[Sequence, int]], logits: Tensor) -> list[PositionResult]:
        """float32 [n, V] -> a result per row."""
        chosen = self._choose(wanted, logits)
        tokens: list[list[int]] = []
        for row, (seq, position) in enumerate(wanted):
            targets = [chosen.get(row, GREEDY)] if seq.request else [t.token_id for t in seq.targets[position]]
            tokens.append(targets)
        columns = torch.tensor([t for group in tokens for t in group], dtype=torch.int64, device=logits.device)
        rows = None  # one token a row
        if any(len(group) != 1 for group in tokens):
            rows = torch.tensor([row for row, group in enumerate(tokens) for _ in group], device=logits.device)
        greedy_ids, logprobs = self.ops.read_out(logits, rows, columns)
        greedy, values = greedy_ids.tolist(), iter(logprobs.tolist())
        results = []
        for row, (seq, position) in enumerate(wanted):
            pairs = [(greedy[row] if token == GREEDY else token, next(values)) for token in tokens[row]]
            num_top = _num_top(seq, position)
            top = _top(self.ops.log_softmax(logits[row : row + 1])[0], num_top) if num_top else {}
            error = NOTHING_LEFT if seq.processing and len(seq.processing.forbidden) == logits.shape[1] else None
            results.append(PositionResult(seq, position, greedy[row], pairs, top, error))
        return results

    def _choose(self, wanted: list[tuple[Sequence, int]], logits: Tensor) -> dict[int, int]:
        """The next token of every generating row that does not just take the model's most probable one: its
        temperature is positive, or processors come before the choice."""
        rows = [i for i, (seq, _) in enumerate(wanted) if seq.processing or _temperature(seq) > 0]
        if not rows:
            return {}
        states = [wanted[i][0].processing for i in rows]
        scores = logits[torch.tensor(rows, device=logits.device)]  # a copy
        for i, state in zip(rows, states, strict=True):
            if state is not None:
                state.advance(wanted[i][0].token_ids)
        penalise(scores, states)
        logprobs = self.ops.log_softmax(scores)
        forbid(logprobs, states)
        chosen: dict[int, int] = {}
        for hot in (False, True):
            part = [n for n, i in enumerate(rows) if (_temperature(wanted[i][0]) > 0) == hot]
            if part:
                own = logprobs if len(part) == len(rows) else logprobs[torch.tensor(part, device=logits.device)]
                found = [wanted[rows[n]] for n in part]
                tokens = self._sample(found, own) if hot else sampling.argmax_lowest(own)
                chosen.update(zip((rows[n] for n in part), tokens.tolist(), strict=True))
        return chosen

    @staticmethod
    def _sample(wanted: list[tuple[Sequence, int]], logprobs: Tensor) -> Tensor:
        """float32 [n, V] -> int64 [n], each row by its request's temperature, top-k, top-p and noise."""
        requests = [r for seq, _ in wanted if (r := seq.request)]
        return sampling.sample(
            logprobs,
            torch.tensor([r.params.temperature for r in requests], dtype=torch.float64),
            torch.tensor([r.params.top_k for r in requests]),
            torch.tensor([r.params.top_p for r in requests], dtype=torch.float64),
            torch.tensor([_noise_key(seq) for seq, _ in wanted]),
            torch.tensor([position + 1 for _, position in wanted]),  # the position being filled
        )

    def _explain_non_finite(self, chunks: list[Chunk], results: list[PositionResult]) -> None:
        """Names, for every row whose logprobs are NaN, the first op whose output was not finite there.

        Found by computing the step again. If that gives finite numbers, no op and no weight is to blame, and naming one
        would mislead (it did, for a race in a kernel): the message says that much.
        """
        bad = [r for r in results if r.greedy_id >= self.spec.vocab_size]
        if not bad:
            return
        row_of = {(c.seq.seq_id, p): row for row, (c, p) in enumerate(_positions(chunks))}
        culprits: dict[int, str] = {}

        def watch(name: str, output: Tensor) -> None:
            if output.shape[0] == len(row_of):
                finite = output.reshape(len(row_of), -1).isfinite().all(dim=1)
                for row in (~finite).nonzero().flatten().tolist():
                    culprits.setdefault(row, name)

        with op_hook(self.model, watch):
            hidden = self._forward(chunks)  # writes the KV that is already there
        for r in bad:
            row = row_of[r.seq.seq_id, r.position]
            if row not in culprits and self.model.compute_logits(hidden[row : row + 1]).isfinite().all():
                found = "the step, computed again, is finite: a bug of a kernel or a fault of the machine; report it"
            else:
                found = f"first in the output of {culprits.get(row, 'lm_head')}"
            r.error = f"not a finite number at token {r.position}: {found}"


def _runs(chunk: Chunk) -> bool:
    return chunk.seq.status is Status.RUNNING


def _wants_greedy(chunk: Chunk) -> bool:
    """Whether the most probable token after the chunk and its logprob are wanted, and nothing else."""
    seq = chunk.seq
    if seq.request is None or seq.processing is not None or chunk.end < seq.num_tokens:
        return False
    return seq.request.params.temperature == 0 and not seq.request.params.logprobs


def rows_per_slice(vocab_size: int, device: torch.device) -> int:
    """Rows that go through lm_head at once."""
    size = CPU_LOGITS_BYTES if device.type == "cpu" else LOGITS_BYTES
    return max(1, size // (4 * vocab_size))


def _positions(chunks: list[Chunk]) -> list[tuple[Chunk, int]]:
    return [(c, p) for c in chunks for p in range(c.start, c.end)]


def _temperature(seq: Sequence) -> float:
    return seq.request.params.temperature if seq.request else 0.0


def _num_top(seq: Sequence, position: int) -> int:
    if seq.request:
        return seq.request.params.logprobs
    return max(t.pending.request.logprobs for t in seq.targets[position])


def _top(logprobs: Tensor, n: int) -> dict[int, float]:
    """The n best tokens of a row [V], best first, ties by id."""
    order = logprobs.sort(descending=True, stable=True)
    return dict(zip(order.indices[:n].tolist(), order.values[:n].tolist(), strict=True))


def _noise_key(seq: Sequence) -> int:
    """64 bits of (seed, what is sampled): the same in every batch, engine and process."""
    assert seq.request is not None
    params = seq.request.params
    name = params.noise_key if params.noise_key is not None else "ids:" + ",".join(map(str, seq.request.prompt_ids))
    digest = hashlib.sha256(f"{params.seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
