"""An engine whose device takes no time, so that a run's time is the host's share.

Scheduling, page tables, uploads, the CUDA graphs' inputs, read-out and results are the engine's own; the model, the
logits and the graphs are stand-ins that return at once. On a GPU that work is done while the device computes, so it
costs time only where it is longer than the device's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine.engine import Engine
from evalengine.engine.execute.cuda_graphs import DecodeGraphs, Key, _Captured
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.layers.parallel import SINGLE

CHOSEN = 5  # the token that every row finds most probable


class NullEngine(Engine):
    """The engine on a CPU, for any size of vocabulary and as many tokens per sequence as requested."""

    def __init__(self, vocab_size: int, max_model_len: int, num_kv_blocks: int, **settings: Any) -> None:
        checkpoint = resolve_checkpoint(ModelConfig(name="null", path="asset:tinymath"))
        spec = replace(checkpoint.spec, vocab_size=vocab_size, max_position_embeddings=max_model_len, num_layers=1)
        config = EngineConfig(device="cpu", num_kv_blocks=num_kv_blocks, block_size=64, **settings)
        super().__init__(replace(checkpoint, spec=spec, tokenizer=None), batch_invariant=False, engine=config)

    def _load(self) -> None:
        model: Any = _Model(self.spec)
        ops: Any = _Ops(self.settings.dtype, self.settings.device)
        self._build(model, ops)
        assert self.runner is not None
        runner = self.runner
        runner.is_asynchronous = True
        sizes: dict[str, Any] = {"max_num_seqs": self.config.max_num_seqs, "max_model_len": self.settings.max_model_len}
        runner.graphs = _Graphs(model, ops, [], runner.last_tokens, block_size=self.settings.block_size, **sizes)


class _Model:
    capturable = True

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, input_ids: Tensor, *_: Any) -> Tensor:
        return torch.empty(len(input_ids), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden.expand(-1, self.spec.vocab_size)

    def read_out(self, logits: Tensor, rows: Tensor | None, columns: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full((len(logits),), CHOSEN), torch.full((len(columns),), -1.0)


class _Ops:
    capturable = True
    tp = SINGLE

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def verify_kernels(self, *_: Any, **__: Any) -> None:
        return None


class _Graph:
    def replay(self) -> None:
        """Does nothing: the outputs were filled at the capture."""


class _Graphs(DecodeGraphs):
    def _capture(self, key: Key) -> _Captured:
        graph: Any = _Graph()
        size = key[0]
        outputs = torch.empty(size, 1), torch.full((size,), CHOSEN), torch.full((size,), -1.0)
        captured = self._captured[key] = _Captured(graph, self._inputs.metadata(*key), *outputs)
        return captured
