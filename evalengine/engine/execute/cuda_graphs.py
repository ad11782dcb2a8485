"""Decode steps as CUDA graphs: one launch in place of one for every kernel.

    n sequences with one new token each, N >= n rows of a captured step, V vocabulary, P pages of a sequence at most.

A step in which every sequence computes one token has the same kernels as the last, so it is captured once for each of
a ladder of sizes and KV lengths, and replayed over buffers of fixed addresses (`DecodeInputs`). Rows past the batch
are padding. In the batch-invariant level a graph gives the bytes of the eager step, since every schedule does.

A graph is captured when its size and length are met for the second time: a run that scores meets none, and the whole
ladder takes seconds. `LLM.capture_graphs` captures it up to `LENGTH_AT_ONCE` tokens at once, where no step may wait.

A step may be launched before the tokens of the last one are known on the host: the new step takes them where the last
one left them on the device (`LastTokens`), and `PendingTokens` fetches the new step's own tokens while the GPU works.

With several ranks, rank 0 decides which steps are replayed and when a graph is captured (`plan`), and all do the same
(`replay`): the collectives inside need every rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from evalengine.config.schema import EngineConfig
from evalengine.engine.execute.decode_inputs import DecodeInputs, Decodes, KnownPages, Stage
from evalengine.engine.execute.read_out import LastTokens
from evalengine.engine.schedule.scheduler import Chunk
from evalengine.engine.settings import Settings
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.ops import Ops
from evalengine.layers.recurrent import LayerCache
from evalengine.layers.shared_blocks import SharedPages
from evalengine.models.causal_lm import CausalLM
from evalengine.models.spec import ModelSpec
from evalengine.models.widths import widths
from evalengine.util.phases import phase

logger = logging.getLogger(__name__)

LARGEST_BATCH = 512  # sequences: a larger step keeps the GPU busy for longer than the host takes to launch it
KV_STEP = 1024  # tokens: the shortest captured KV length; the kernels' grids grow in chunks of this many tokens
LENGTH_AT_ONCE = 4096  # KV tokens: longer sequences are rare, and every length costs a graph of each size
CAPTURE_AFTER = 2  # steps of a size and length after which its graph is captured: one step is not worth a graph
# Steps of a size and length that could read shared pages once, after which a graph that does is captured where another
# one serves them already.
CASCADE_AFTER = 32
Key = tuple[int, int, bool]  # of a graph: size, kv_len and cascade of `Replay`


@dataclass(frozen=True)
class Replay:
    """A step that a graph serves."""

    size: int  # rows of the graph
    kv_len: int  # tokens that its kernels are laid out for
    cascade: bool  # whether it reads what decodes share once
    capture: bool  # whether the graph is captured first
    decodes: Decodes


@dataclass(frozen=True)
class PendingTokens:
    """The greedy tokens of a replayed step on their way to the host; to be read before the step after the next."""

    count: int
    stage: Stage

    def read(self) -> list[tuple[int, float]]:
        """(token id, its logprob) of each sequence, in the order of the chunks. Waits for the step."""
        self.stage.wait()
        ids, logprobs = (x[: self.count].tolist() for x in (self.stage.greedy_ids, self.stage.logprobs))
        return list(zip(ids, logprobs, strict=True))


@dataclass(frozen=True)
class Decoded:
    """The results of a replayed step: a row for each sequence, in the order of the chunks."""

    hidden: Tensor  # [n, H], valid until the next step
    greedy: PendingTokens


@dataclass(frozen=True)
class _Captured:
    """A graph and the buffers that it writes."""

    graph: torch.cuda.CUDAGraph
    metadata: AttentionMetadata  # its plans hold the buffers that the captured launches use
    hidden: Tensor  # [N, H]
    greedy_ids: Tensor  # int64 [N]
    logprobs: Tensor  # float32 [N]: the greedy tokens' logprobs


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows that are captured, ascending: the last is the largest batch that a graph serves."""
    largest = min(max_num_seqs, LARGEST_BATCH)
    ladder = [1, 2, 4, 8, *range(16, 128, 16), *range(128, LARGEST_BATCH + 1, 32)]
    return [*(size for size in ladder if size < largest), largest]


def kv_lengths(max_model_len: int) -> list[int]:
    """The KV lengths that are captured, ascending: powers of two times `KV_STEP`, then `max_model_len`."""
    lengths = [KV_STEP]
    while lengths[-1] < max_model_len:
        lengths.append(lengths[-1] * 2)
    return [*lengths[:-1], max_model_len]


def has_graphs(config: EngineConfig, settings: Settings) -> bool:
    """Whether decode steps will be replayed: `Ops.capturable`, from the settings, before the ops are made."""
    by_shape = settings.attention_backend in ("triton", "flash_attn")
    return settings.device.type == "cuda" and by_shape and not config.enforce_eager


def graph_bytes(spec: ModelSpec, max_num_seqs: int, settings: Settings) -> int:
    """Roughly the device memory that the captured steps take: the logits, activations and state of split attention of
    one step of the largest size, and the graphs' inputs."""
    rows, item = batch_sizes(max_num_seqs)[-1], settings.dtype.itemsize
    heads, sizes = spec.num_heads + spec.num_kv_heads, widths(spec)
    widest = 3 * sizes.inner + sizes.hidden + sizes.outputs + 3 * heads * spec.head_dim
    chunks = -(-settings.max_model_len // KV_STEP)
    # Twice, because a workspace that is too small is replaced by one of double size.
    state = 2 * chunks * spec.num_heads * (spec.head_dim + 2)
    return rows * (4 * spec.vocab_size + 2 * item * widest + 4 * state + 4 * settings.max_model_len)


class _Workspace:
    """Memory for the state of split attention, which all graphs use in turn. A graph that was captured with a smaller
    buffer keeps that one."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, device=device)

    def __call__(self, count: int) -> Tensor:
        """float32 [count]."""
        if count > len(self._buffer):
            self._buffer = torch.empty(max(count, 2 * len(self._buffer)), device=self._buffer.device)
        return self._buffer[:count]


class DecodeGraphs:
    """The captured steps of one model over one KV pool."""

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv_caches: list[LayerCache],
        last_tokens: LastTokens,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        table_of: Sequence[int] = (0,),
        least_saved: int | None = None,
        has_rope_starts: bool = False,
        states: bool = False,
    ) -> None:
        """table_of: each layer's block table. least_saved: `sharing.least_saved`. has_rope_starts: whether sequences
        may have a `rope_start`. states: whether layers are recurrent."""
        self._model, self._ops, self._kv_caches, self._block_size = model, ops, kv_caches, block_size
        self._sizes, self._lengths = batch_sizes(max_num_seqs), kv_lengths(max_model_len)
        self._last_tokens = last_tokens
        pages = -(-max_model_len // block_size)
        chunks = None if least_saved is None else -(-max_model_len // KV_STEP)
        self._inputs = DecodeInputs(self._sizes[-1], pages, block_size, ops.device, table_of, chunks)
        self._cascade_after = CAPTURE_AFTER if least_saved == 1 else CASCADE_AFTER  # where another graph serves
        self._known_pages = KnownPages(self._sizes[-1], has_rope_starts, states=states)
        self._workspace = _Workspace(ops.device)
        self._captured: dict[Key, _Captured] = {}
        self._uses: Counter[Key] = Counter()
        self._full = False  # whether there is no memory for another graph

    def usual_keys(self) -> list[tuple[int, int]]:
        """The graphs to capture at once: every (size, length), the largest size first, since its memory serves the
        others."""
        lengths = [length for length in self._lengths if length <= LENGTH_AT_ONCE]
        return [(size, length) for length in lengths for size in reversed(self._sizes)]

    def capture(self, size: int, kv_len: int) -> bool:
        """Captures a step over padding; returns whether there was memory for the graph."""
        return self._capture((size, kv_len, False)) is not None

    def plan(self, chunks: Sequence[Chunk], shared: SharedPages | None = None) -> Replay | None:
        """How to replay the step; None if no graph serves it (prompts in it, too many sequences, met too seldom).

        shared: what its decodes share, if it pays to read that once.
        """
        if len(chunks) > self._sizes[-1] or any(c.end - c.start != 1 for c in chunks):
            return None
        size, kv_len = self._key(len(chunks), max(c.end for c in chunks))
        for cascade in (True, False) if shared is not None else (False,):
            key = size, kv_len, cascade
            capture = key not in self._captured
            if capture:
                self._uses[key] += 1
                served = cascade and (size, kv_len, False) in self._captured
                if self._full or self._uses[key] < (self._cascade_after if served else CAPTURE_AFTER):
                    continue
            return Replay(*key, capture, self._known_pages.decodes(chunks, shared if cascade else None))
        return None

    def replay(self, step: Replay) -> Decoded | None:
        """Replays the step on the current stream; None if a single rank had no memory for its graph."""
        stage = self._inputs.fill(step.decodes)
        key, n = (step.size, step.kv_len, step.cascade), len(step.decodes.ids)
        captured = self._capture(key) if step.capture else self._captured.get(key)
        if captured is not None:
            captured.graph.replay()
            hidden, greedy_ids, logprobs = captured.hidden, captured.greedy_ids, captured.logprobs
        elif self._ops.tp.size > 1:  # the other ranks have a graph, and its collectives need this one
            hidden, greedy_ids, logprobs = self._step(step.size, self._metadata(key))
        else:
            return None
        stage.fetch(greedy_ids[:n], logprobs[:n])
        return Decoded(hidden[:n], PendingTokens(n, stage))

    def forget(self) -> None:
        """Has all pages written anew: a step that was planned has failed, so what the device knows is not certain."""
        self._known_pages.forget()

    def _key(self, num_seqs: int, kv_len: int) -> tuple[int, int]:
        size = next(size for size in self._sizes if size >= num_seqs)
        return size, next(length for length in self._lengths if length >= kv_len)

    def _metadata(self, key: Key) -> AttentionMetadata:
        metadata = self._inputs.metadata(*key)
        for own in metadata.layers or (metadata,):
            own.plans["workspace"] = self._workspace
        return metadata

    @cached_property
    def _pool(self) -> Any:
        """The memory pool of all graphs: they run one after another, and little of each one's results is stored."""
        return torch.cuda.graph_pool_handle()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._ops.device)

    @phase("graphs")
    def _capture(self, key: Key) -> _Captured | None:
        """Captures the step's graph; None, with a warning, if even the memory that torch caches does not suffice.

        The largest size is the first that is captured, since its memory serves the others: batches that grow would
        otherwise take memory for each size.
        """
        size, kv_len, cascade = key
        if not self._captured and not self._full and size < self._sizes[-1]:
            self._capture((self._sizes[-1], kv_len, cascade))
        warm_alone = self._ops.tp.size > 1  # the warm-up's collectives run once on every rank, even if a capture fails
        metadata = self._metadata(key)
        if warm_alone:
            self._warm(size, metadata)
        for _ in range(0 if self._full else 2):
            try:
                if not warm_alone:
                    self._warm(size, metadata)
                self._captured[key] = captured = self._captured_now(size, metadata)
                return captured
            except RuntimeError as error:  # instantiating a graph raises another error than torch's allocator does
                if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
                    raise
                torch.cuda.empty_cache()
        if not self._full:
            logger.warning(
                "no memory for a CUDA graph of %d sequences: such steps are launched kernel by kernel; "
                "lower engine.kv_cache_memory_fraction or engine.num_kv_blocks for speed",
                size,
            )
        self._full = True
        return None

    def _warm(self, size: int, metadata: AttentionMetadata) -> None:
        """Run the step over padding, so that every kernel is compiled and laid out: one layer of it, where the other
        layers' kernels are the same.

        Over padding, because this run is not committed (`rank_runner`). Over the step's own inputs it would write the
        same keys and values as the step, but advance a recurrent state twice.
        """
        tokens = self._last_tokens.tokens.clone()
        try:
            with self._inputs.padding():
                self._step(size, metadata, num_layers=1 if self._model.layers_alike else None)
        finally:  # The captured step reads the last step's tokens later, so they are restored.
            self._last_tokens.tokens.copy_(tokens)

    def _captured_now(self, size: int, metadata: AttentionMetadata) -> _Captured:
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._ops.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = self._step(size, metadata)
            except BaseException:
                with suppress(RuntimeError):  # the first error says more than that its capture is invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(self._stream)
        return _Captured(graph, metadata, *results)

    def _step(
        self, size: int, metadata: AttentionMetadata, num_layers: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes hidden states, greedy tokens and their logprobs; keeps the tokens where the next step may take them.

        The logits are not stored, so that all graphs compute theirs in the same memory. A step that wants more than the
        greedy tokens has the logits computed again from the hidden states.
        """
        inputs = self._inputs
        ids = self._last_tokens.resolve(inputs.ids[:size])
        hidden = self._model(ids, inputs.positions[:size], self._kv_caches[:num_layers], metadata)
        logits = self._model.compute_logits(hidden)
        greedy_ids, logprobs = self._model.read_out(logits, None, inputs.wanted[:size])
        self._last_tokens.put(greedy_ids)
        return hidden, greedy_ids, logprobs
