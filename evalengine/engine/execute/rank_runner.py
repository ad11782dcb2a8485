"""One rank's part of a step: its share of the forward pass, of the pool and of the read-out.

T tokens in the step. A step is described in integers (`Batch`, `LogitsIndices`, `Replay`); only rank 0 has sequences.

**A step may execute any number of times before it is committed.** What a committed step reads (KV pages, convolution
states, recurrent states, the last step's tokens) must not depend on executions that do not count:

| execution that does not count | why it changes nothing |
|---|---|
| warm-up before a graph is captured | runs over padding (`DecodeInputs.padding`); the last tokens are restored |
| capture | executes no kernel |
| a step that failed (out of memory) | with states, all sequences restart from zeros; no held state is used |
| a step repeated to find its first non-finite op | writes the same KV again; rejected where layers have states |
| a rejected guess | its KV and its rows of open chunks and rings are overwritten before they are read |
| a token past an end that is seen late | its sequence has finished, and its slot's next owner starts from zeros |

A KV write may be repeated, since a token's key and value have one slot. A state is advanced in place, so an execution
that may not count must not be given its slot. Guesses are given it where they only add rows, within the limits of
`recurrent_variant.most_guesses`. Code that cannot promise this is rejected where it is constructed: there is no drafter
where a state is updated token by token, and `culprits` takes no batch where layers have states.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.execute.batch import Batch, LogitsIndices
from evalengine.engine.execute.cuda_graphs import Decoded, DecodeGraphs, Replay
from evalengine.engine.execute.read_out import Choose, DeviceResults, LastTokens, ReadOut
from evalengine.engine.kv_layout import KVLayout
from evalengine.engine.states import independent, state_pools
from evalengine.layers.embedding import rows_per_slice
from evalengine.layers.hooks import op_hook
from evalengine.layers.metadata import AttentionMetadata, token_positions, upload
from evalengine.layers.ops import Ops
from evalengine.layers.plain import PlainOps, computed_by
from evalengine.layers.recurrent import LayerCache, layer_cache
from evalengine.models.causal_lm import CausalLM
from evalengine.models.spec import ModelSpec

logger = logging.getLogger(__name__)
READ_OUT = 64  # tokens whose logprobs `errors` compares
Culprits = dict[int, tuple[int, str]]  # row -> number and name of the first op that was not finite there


@dataclass(frozen=True)
class Errors:
    """How far a computation is from plain PyTorch ops in float32."""

    rms: float  # of all tokens' logprobs, nats, with the same experts for each token
    choices: float  # share of the tokens' choices of experts that are not those of float32


@torch.inference_mode()
def errors(
    model: CausalLM, ops: Ops, layout: KVLayout, block_size: int, ids: list[int]
) -> tuple[Errors, Errors] | None:
    """The errors of this model's ops, and of plain PyTorch ops in its dtype, over the last `READ_OUT` tokens.

    None for a level whose weights plain ops cannot read, and if one rank has no memory for it.
    """
    if ops.name != "native":
        return None
    count = -(-len(ids) // block_size)
    tables = [[list(range(first, first + count))] for first in range(0, layout.num_tables * count, count)]
    step = Batch(np.array(ids, dtype=np.int64), [len(ids)], [len(ids)], tables, [0], [0], [0])

    def logprobs(own: Ops) -> tuple[Tensor, list[Tensor]]:
        with computed_by(model, own) as chosen:
            hidden = RankRunner(model, model.spec, own, layout, count, block_size, 1).forward(step)[-READ_OUT:]
            return model.whole_logits(model.compute_logits(hidden)).log_softmax(-1), chosen

    def of(own: Ops) -> Errors:
        found, chosen = logprobs(own)
        exact = PlainOps(ops, torch.float32, chosen)
        difference = found - logprobs(exact)[0]
        return Errors(float(difference.square_().mean().sqrt()), exact.num_other_choices / max(1, exact.num_choices))

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the reference must not be TF32
    try:
        return of(ops), of(PlainOps(ops, ops.dtype))
    except torch.OutOfMemoryError:
        if ops.tp.size > 1:  # the other ranks wait in a collective
            raise
        logger.warning("the self-test has no memory to compare this model with plain PyTorch ops: not compared")
        return None
    finally:
        torch.set_float32_matmul_precision(precision)


class RankRunner:
    """One rank's model and KV pool."""

    def __init__(
        self,
        model: CausalLM,
        spec: ModelSpec,
        ops: Ops,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        graphs_up_to: int | None = None,
        least_saved: int | None = None,
    ) -> None:
        """num_blocks: how often the pool has room for `block_size` tokens of all layers. graphs_up_to: the most tokens
        of a sequence whose decode steps are replayed as CUDA graphs; None: never. least_saved: `sharing.least_saved`.
        """
        self.model = model
        self.spec = spec
        self.ops = ops
        self.block_size, self.least_saved = block_size, least_saved
        kv_heads = spec.kv_heads_of_rank(ops.tp.size)
        pages = num_blocks * layout.num_tables
        shape = layout.pool_shape(pages, block_size, kv_heads, spec.head_dim)
        self.kv_pool = torch.empty(shape, dtype=ops.dtype, device=ops.device)
        self.kv_caches: list[LayerCache] = [*layout.caches(self.kv_pool)]
        self.table_of = layout.table_of
        states_of_layers, self.states = state_pools(spec, ops, max_num_seqs)
        for layer, states in states_of_layers.items():
            self.kv_caches[layer] = layer_cache(self.kv_caches[layer], states, spec.block(layer).beside_attention)
        self.last_tokens = LastTokens(max_num_seqs, spec.vocab_size, ops.device)
        self.read_out = ReadOut(model, ops, rows_per_slice(spec.vocab_size, ops.device), self.last_tokens)
        self.graphs: DecodeGraphs | None = None
        if graphs_up_to is not None and ops.capturable and model.capturable:
            seqs = min(max_num_seqs, self.read_out.rows_per_slice)  # one slice, verified at the start
            self.graphs = DecodeGraphs(
                model, ops, self.kv_caches, self.last_tokens, block_size=block_size, max_num_seqs=seqs,
                max_model_len=graphs_up_to, table_of=self.table_of, least_saved=least_saved,
                has_rope_starts=spec.short_positions(graphs_up_to) > 0,
                states=bool(self.states),
            )  # fmt: skip

    def fill_pools(self, value: float) -> None:
        """Fills the KV pool and the pools of states with one number."""
        self.kv_pool.fill_(value)
        for pool in self.states:
            pool.fill_(value)

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        """Copies slots of states in all layers, (source, destination), in order."""
        for group in independent(copies):
            (pairs,) = upload([np.array(group, dtype=np.int64)], self.ops.device)
            for pool in self.states:
                self.ops.copy_slots(pool, pairs)

    def capture(self, size: int, kv_len: int) -> bool:
        """Captures a decode step; returns whether there was memory for its graph."""
        assert self.graphs is not None
        return self.graphs.capture(size, kv_len)

    def compute(
        self, copies: list[tuple[int, int]], batch: Batch, wanted: LogitsIndices, choose: Choose | None = None
    ) -> DeviceResults | None:
        """Launches a step kernel by kernel. copies: pages to copy before it, (source, destination)."""
        self._copy_pages(copies)
        return self.read_out.launch(wanted, self.forward(batch), choose)

    def replay(
        self, copies: list[tuple[int, int]], step: Replay, wanted: LogitsIndices | None, choose: Choose | None = None
    ) -> tuple[Decoded, DeviceResults | None] | None:
        """Replays a step as a CUDA graph. None if `DecodeGraphs.replay` gives None; the pages are copied all the same.

        wanted: what is to be read out; None if no more than each row's most probable token.
        """
        assert self.graphs is not None
        self._copy_pages(copies)
        decoded = self.graphs.replay(step)
        if decoded is None:
            return None
        return decoded, None if wanted is None else self.read_out.launch(wanted, decoded.hidden, choose)

    def forward(self, batch: Batch) -> Tensor:
        """The batch's hidden states, [T, H]."""
        positions = token_positions(batch.query_lens, batch.kv_lens)
        if any(batch.rope_starts):
            positions += np.repeat(batch.rope_starts, batch.query_lens)
        input_ids, where = upload([batch.ids, positions], self.ops.device)
        if batch.ids.min() < 0:
            input_ids = self.last_tokens.resolve(input_ids)
        step = batch.query_lens, batch.kv_lens, batch.tables, self.block_size, self.ops.device, batch.shared
        tables = AttentionMetadata.build_each(*step)
        if self.states:
            places = [np.array(slots, dtype=np.int32) for slots in (batch.slots, batch.start_slots)]
            slots, start_slots = upload(places, self.ops.device)
            if not self.ops.chunked:  # a state is read where it is written
                pairs = zip(batch.start_slots, batch.slots, strict=True)
                self.copy_states([(start, slot) for start, slot in pairs if start != slot])
            tables = [replace(table, state_slots=slots, slots=batch.slots, start_slots=start_slots) for table in tables]
        metadata = AttentionMetadata.of_layers(tables, self.table_of)
        return self.model(input_ids, where, self.kv_caches, metadata)

    def culprits(self, batch: Batch) -> tuple[Culprits, Tensor]:
        """Computes the step once more, watching every op: the rows that are not finite, and the hidden states.

        The KV that it writes is there already; a recurrent state would advance twice. With several ranks, each sees
        its own columns only.
        """
        assert not self.states, "a step with recurrent states cannot be computed again"
        culprits: Culprits = {}
        number = 0

        def watch(name: str, output: Tensor) -> None:
            nonlocal number
            number += 1
            if output.shape[0] == len(batch.ids):
                finite = output.reshape(len(batch.ids), -1).isfinite().all(dim=1)
                for row in (~finite).nonzero().flatten().tolist():
                    culprits.setdefault(row, (number, name))

        with op_hook(self.model, watch):
            hidden = self.forward(batch)
        return culprits, hidden

    def _copy_pages(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            source, destination = upload([*np.array(copies, dtype=np.int64).T], self.ops.device)
            for layer in self.kv_pool:  # layer by layer, since the pages being copied are in memory twice
                layer[:, destination] = layer[:, source]
