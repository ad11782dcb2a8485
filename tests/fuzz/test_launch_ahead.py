"""Random engines, pools, batches and endings: steps launched ahead give the bytes of steps that wait.

The model is a stand-in whose logits are a hash of every token that the pool holds for a sequence, so one that is
missing, stale or another sequence's changes everything after it; layers with windows must hold the same tokens as far
as they see. The inputs are those of the CUDA graphs, on a CPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from evalengine.config.schema import ModelConfig
from evalengine.engine.execute.batch import Batch
from evalengine.engine.execute.cuda_graphs import Decoded, DecodeGraphs, Replay
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.schedule.scheduler import Chunk
from evalengine.layers.metadata import AttentionMetadata
from evalengine.layers.shared_blocks import SharedPages
from evalengine.models.spec import Block
from tests.engine.test_launch_ahead import STOP_IDS, check, go_ahead
from tests.fuzz.cases import Case, cases

PRIME = 2_147_483_647


class HashModel(torch.nn.Module):
    """`DecoderForCausalLM` without layers: it stores each token in its slots, and hashes what the sequence's slots hold
    in the first layer, which sees everything. The others hold the same within their windows.

    broken: one in so many hashes gives NaN; 0 for none.
    """

    def __init__(self, llm: LLM, broken: int) -> None:
        super().__init__()
        assert llm.runner is not None
        self.spec, self.block_size, self.broken = llm.spec, llm.settings.block_size, broken
        self.ops = llm.runner.ops

    def forward(self, ids: Tensor, positions: Tensor, kv_caches: Any, metadata: AttentionMetadata) -> Tensor:
        stored = [self._store(ids, cache[0], metadata.of_layer(layer)) for layer, cache in enumerate(kv_caches)]
        hashes: list[int] = []
        for seq, (queries, length) in enumerate(zip(metadata.query_lens, metadata.seqlens_k.tolist(), strict=True)):
            seen = self._seen(stored[0], metadata, seq, range(length))
            assert np.isfinite(seen).all(), "a slot is read that nothing was written to"
            for layer in range(1, len(kv_caches)):
                visible = range(max(0, length - queries + 1 - (self.spec.block(layer).window or length)), length)
                own = self._seen(stored[layer], metadata.of_layer(layer), seq, visible)
                assert np.array_equal(own, seen[visible]), "a windowed layer holds other tokens"
            value = 7
            for at, (low, high) in enumerate(seen.astype(np.int64).tolist()):
                value = (value * 1_000_003 + (low + 32 * high) * 7919 + at) % PRIME
                if at >= length - queries:
                    hashes.append(value)
        return torch.tensor(hashes, dtype=torch.int64)[:, None]

    def _store(self, ids: Tensor, keys: Tensor, metadata: AttentionMetadata) -> np.ndarray:
        """Writes the tokens to a layer's slots; returns what all slots hold."""
        slots = keys.view(-1, *keys.shape[2:])
        written = metadata.slot_mapping >= 0
        places = metadata.slot_mapping[written]
        slots[places, 0, 0] = (ids[written] % 32).to(keys.dtype)
        slots[places, 0, 1] = (ids[written] // 32).to(keys.dtype)
        return slots[:, 0, :2].float().numpy()

    def _seen(self, stored: np.ndarray, metadata: AttentionMetadata, seq: int, positions: range) -> np.ndarray:
        position = np.array(positions, dtype=np.int64)
        page = metadata.block_table[seq].numpy()[position // self.block_size].astype(np.int64)
        seen: np.ndarray = stored[page * self.block_size + position % self.block_size]
        return seen

    def compute_logits(self, hidden: Tensor) -> Tensor:
        tokens = torch.arange(self.spec.vocab_size)[None]
        logits = ((hidden * 1_103_515_245 + tokens * 40_503 * (hidden % 1009 + 1)) % 65_537).float() / 6553.7
        if self.broken:
            logits[hidden[:, 0] % self.broken == 0] = float("nan")
        return logits

    def whole_logits(self, logits: Tensor) -> Tensor:
        return logits

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.read_out(logits, rows, columns)


class Tokens(NamedTuple):
    """`PendingTokens` of tokens that are computed already, though nothing has read them."""

    computed: list[tuple[int, float]]

    def read(self) -> list[tuple[int, float]]:
        return self.computed


class HashGraphs(DecodeGraphs):
    """`DecodeGraphs` with its sizes, inputs and rule of when a graph is there; it computes at once and is read late."""

    def __init__(self, llm: LLM) -> None:
        assert llm.runner is not None
        runner, settings = llm.runner, llm.settings
        most, longest = llm.config.max_num_seqs, settings.max_model_len
        sizes: dict[str, Any] = {"block_size": settings.block_size, "max_num_seqs": most, "max_model_len": longest}
        sizes["table_of"] = runner.table_of
        super().__init__(runner.model, runner.ops, runner.kv_caches, runner.last_tokens, **sizes)
        self.runner, self.ahead = runner, 0

    def plan(self, chunks: Sequence[Chunk], shared: SharedPages | None = None) -> Replay | None:
        self.chunks = chunks
        return super().plan(chunks, shared)

    def replay(self, step: Replay) -> Decoded:
        chunks, n, key = self.chunks, len(self.chunks), (step.size, step.kv_len)
        unknown = [c.start >= c.seq.num_tokens for c in chunks]
        self._inputs.fill(step.decodes)
        batch, cpu = Batch.of(chunks), torch.device("cpu")
        each = AttentionMetadata.build_each([1] * n, batch.kv_lens, batch.tables, self._block_size, cpu)
        wanted = AttentionMetadata.of_layers(each, self.runner.table_of)
        metadata = self._inputs.metadata(*key)
        for layer, table in enumerate(self.runner.table_of):
            own, expected = metadata.of_layer(layer), wanted.of_layer(layer)
            assert torch.equal(own.slot_mapping[:n], expected.slot_mapping) and (own.slot_mapping[n:] == -1).all()
            assert torch.equal(own.seqlens_k[:n], expected.seqlens_k) and (own.seqlens_k[n:] == 0).all()
            rows = enumerate(batch.tables[table])
            assert all(own.block_table[row, : len(pages)].tolist() == pages for row, pages in rows)
        ids = self._last_tokens.resolve(self._inputs.ids[: key[0]])[:n].clone()
        assert all(u or int(i) == c.seq.token_ids[c.start] for u, i, c in zip(unknown, ids, chunks, strict=True))
        self.ahead += sum(unknown)
        hidden = self.runner.model(ids, self._inputs.positions[:n].clone(), self.runner.kv_caches, wanted)
        logits = self.runner.model.compute_logits(hidden)
        greedy, logprobs = self.runner.ops.read_out(logits, None, torch.full((n,), -1))
        self._last_tokens.tokens.fill_(-7)  # no step may take this token
        self._last_tokens.put(greedy)
        tokens: Any = Tokens(list(zip(greedy.tolist(), logprobs.tolist(), strict=True)))
        return Decoded(hidden, tokens)


def requests(case: Case) -> list[Request]:
    """A batch of random requests, many with a shared prefix."""
    shared = [[case.randrange(1, 1000) for _ in range(case.choice([1, 3, 8, 16, 17, 33]))] for _ in range(2)]
    hot = case.choice([0.0, 0.0, 0.05, 0.3])
    batch: list[Request] = []
    for i in range(case.randrange(1, 14)):
        own = [case.randrange(1, 1000) for _ in range(case.choice([1, 1, 2, 7, 15, 16, 31]))]
        prompt = (case.choice(shared) + own if case.random() < 0.6 else own)[:56]
        if case.random() < 0.2:
            batch.append(ScoreRequest(i, prompt, own[:8], case.choice([0, 0, 2])))
            continue
        endings: list[dict[str, Any]] = [{"ignore_eos": True}, {}, {"stop": ("e", "1")}, {"stop_token_ids": STOP_IDS}]
        params = SamplingParams(
            max_tokens=case.choice([1, 2, 3, 9, 30, 200]),
            temperature=0.8 if case.random() < hot else 0.0,
            logprobs=2 if case.random() < 0.05 else 0,
            **case.choice(endings),
        )
        batch.append(GenerateRequest(i, prompt, params))
    return batch


def engine_settings(case: Case) -> dict[str, Any]:
    """Random settings of a small engine that can hold one sequence at least."""
    block_size, longest = case.choice([1, 2, 4, 16, 16, 32]), case.choice([64, 96, 128])
    least = -(-longest // block_size)
    return {
        "device": "cpu",
        "num_threads": 1,
        "block_size": block_size,
        "max_model_len": longest,
        "num_kv_blocks": case.choice([least, least + 1, least + 3, 2 * least, 4 * least]),
        "max_num_seqs": case.choice([1, 2, 3, 5, 16]),
        "max_num_batched_tokens": case.choice([1, 2, 5, 17, 64, 4096]),
        "enable_prefix_caching": case.random() < 0.75,
    }


def stand_in(llm: LLM, broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the hashing model into the engine, and NaN into every slot of the pool."""
    assert llm.runner is not None
    model: Any = HashModel(llm, broken)
    llm.runner.model = llm.runner.read_out.model = model
    llm.runner.kv_pool.fill_(float("nan"))
    monkeypatch.setattr(llm.runner.ops, "log_softmax", lambda logits: torch.log_softmax(logits, -1))


def run(llm: LLM, batch: list[Request]) -> dict[int, RequestOutput]:
    return {output.request_id: output for output in llm.run(batch, lambda _: check(llm))}


def same(output: RequestOutput, expected: RequestOutput) -> bool:
    """Whether two outputs are equal, logprobs to the bit."""
    fields = ("token_ids", "text", "finish_reason", "error", "is_greedy")
    return (
        all(getattr(output, name) == getattr(expected, name) for name in fields)
        and output.logprobs.tobytes() == expected.logprobs.tobytes()
        and repr(output.top_logprobs) == repr(expected.top_logprobs)
    )


def test_steps_launched_ahead_are_those_that_wait(hash_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = replayed = 0
    for case in cases("launch_ahead", 8):
        settings, window = engine_settings(case), case.choice([None, 1, 5, 16, 33])
        blocks = (Block(),) if window is None else (Block(), Block(window=window), Block(window=window))
        spec = replace(hash_checkpoint.spec, num_layers=len(blocks), blocks=blocks)
        with case.named(settings), LLM(replace(hash_checkpoint, spec=spec), **settings) as llm:
            broken, batches = case.choice([0, 0, 29]), [requests(case) for _ in range(2)]
            stand_in(llm, broken, monkeypatch)
            expected = [run(llm, batch) for batch in batches]
            llm.reconfigure()
            stand_in(llm, broken, monkeypatch)
            go_ahead(llm)
            assert llm.runner is not None
            graphs = HashGraphs(llm)
            if case.random() < 0.7:
                llm.runner.graphs = graphs
            for batch, wanted in zip(batches * 2, expected * 2, strict=True):  # the second time, the cache is warm
                if case.random() < 0.3:
                    iterator: Any = llm.run(batch)
                    for _ in range(random.Random(case.name).randrange(1, len(batch) + 1)):
                        next(iterator)
                    iterator.close()
                outputs = run(llm, batch)
                assert outputs.keys() == wanted.keys() and all(same(outputs[i], wanted[i]) for i in outputs)
                assert llm.block_manager.num_free_blocks == llm.num_kv_blocks
            ahead += llm.stats.num_steps_ahead
            replayed += graphs.ahead
    assert ahead > 0 and replayed > 0, "no step was launched ahead: this test shows nothing"


@pytest.fixture(scope="module")
def hash_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of one small layer, whose own output is never asked for."""
    asset, folder = Path(str(files("evalengine.assets") / "tinymath")), tmp_path_factory.mktemp("hash")
    config = json.loads((asset / "config.json").read_text())
    config |= {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "max_window_layers": 1,
    }
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((asset / name).read_text())
    return resolve_checkpoint(ModelConfig(name="hash", path=str(folder), load_format="dummy"))
