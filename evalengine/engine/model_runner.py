"""Runs one scheduled step on the device: builds the ragged batch, runs the model, turns wanted logits into numbers.

    T tokens in the step, n wanted positions, V vocabulary.

Only the wanted positions go through lm_head, a slice of rows at a time, so that [n, V] logits never exist at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evalengine.engine.scheduler import Chunk, Schedule
from evalengine.engine.sequence import Sequence
from evalengine.kernels import sampling
from evalengine.layers.hooks import op_hook
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import GREEDY, Ops
from evalengine.models.config import ModelSpec
from evalengine.models.decoder import DecoderForCausalLM

LOGITS_BYTES = 64 << 20  # of one slice of logits


@dataclass
class PositionResult:
    """What one wanted position gave. `tokens` are the chosen token (generation) or the targets' (scoring)."""

    seq: Sequence
    position: int
    greedy_id: int
    tokens: list[tuple[int, float]]  # token id, logprob
    top: dict[int, float] = field(default_factory=dict)
    error: str | None = None


class ModelRunner:
    def __init__(self, model: DecoderForCausalLM, spec: ModelSpec, ops: Ops, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.spec = spec
        self.ops = ops
        self.block_size = block_size
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self.kv_pool = torch.empty(shape, dtype=ops.dtype, device=ops.device)
        self.kv_caches = [(layer[0], layer[1]) for layer in self.kv_pool]
        self.rows_per_slice = rows_per_slice(spec.vocab_size)
        # told of every step before it runs, its chunks in the order of the batch's rows: what `op_hook` shows whom
        self.on_batch: Callable[[Schedule], None] | None = None

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> list[PositionResult]:
        self._copy_pages(schedule.copies)
        chunks = sorted(schedule.chunks, key=lambda c: c.end - c.start > 1)  # decodes first: see AttentionMetadata
        if self.on_batch is not None:
            self.on_batch(Schedule(chunks, schedule.copies))
        hidden = self._forward(chunks)
        wanted, rows = self._wanted(chunks)
        results: list[PositionResult] = []
        for i in range(0, len(wanted), self.rows_per_slice):
            part = wanted[i : i + self.rows_per_slice]
            selected = hidden[rows[i : i + self.rows_per_slice]]
            results.extend(self._read_out(part, self.model.compute_logits(selected)))
        self._explain_non_finite(chunks, results)
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
        sampled = self._sample(wanted, logits)
        tokens: list[list[int]] = []
        for row, (seq, position) in enumerate(wanted):
            targets = [sampled.get(row, GREEDY)] if seq.request else [t.token_id for t in seq.targets[position]]
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
            results.append(PositionResult(seq, position, greedy[row], pairs, top))
        return results

    def _sample(self, wanted: list[tuple[Sequence, int]], logits: Tensor) -> dict[int, int]:
        """The next token of every generating row whose temperature is positive."""
        rows = [i for i, (seq, _) in enumerate(wanted) if seq.request and seq.request.params.temperature > 0]
        if not rows:
            return {}
        requests = [r for i in rows if (r := wanted[i][0].request)]
        picked = sampling.sample(
            self.ops.log_softmax(logits[torch.tensor(rows, device=logits.device)]),
            torch.tensor([r.params.temperature for r in requests], dtype=torch.float64),
            torch.tensor([r.params.top_k for r in requests]),
            torch.tensor([r.params.top_p for r in requests], dtype=torch.float64),
            torch.tensor([_noise_key(wanted[i][0]) for i in rows]),
            torch.tensor([wanted[i][1] + 1 for i in rows]),  # the position being filled
        )
        return dict(zip(rows, picked.tolist(), strict=True))

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


def rows_per_slice(vocab_size: int) -> int:
    """Rows that go through lm_head at once."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def _positions(chunks: list[Chunk]) -> list[tuple[Chunk, int]]:
    return [(c, p) for c in chunks for p in range(c.start, c.end)]


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
