"""A trial when a module is loaded: whether a row's bits depend on its own sequence alone.

Two things are tested. The audit of the batch-invariant mode names every op of the module that has no promise. And three
short sequences in one step must give the rows that each gives alone, in parts, so that what no op shows is seen,
too: a state outside the KV pool, positions that are not those given, a capacity that a batch shares.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from evalengine.errors import ConfigError
from evalengine.invariant import CoverageAudit, UncoveredOpError
from evalengine.kernels.attention_batch import KVCache
from evalengine.layers.metadata import AttentionMetadata, token_positions, upload
from evalengine.models.file_values import one_line
from evalengine.models.hf_module.model import TransformersForCausalLM

logger = logging.getLogger(__name__)

LENGTHS = (1, 13, 6)  # tokens of the sequences, those of one token first
WHOLE: list[tuple[int, int] | None] = [(0, length) for length in LENGTHS]
PARTS = (5, 1, 7)  # of the second one: a prompt's beginning, a decode, the rest
PAGE = 4
FAST_ERROR = (
    0.25  # of a row at `fast`, relative to its norm: bf16's errors are a tenth of that, another row's is above 1
)


@torch.inference_mode()
def check_module(model: TransformersForCausalLM) -> None:
    """Raises `ConfigError`, with the ops' names, for a module whose rows could depend on each other."""
    name, level = model.spec.architecture, model.ops.name
    pool = _Pool(model)
    together = pool.step(WHOLE) if level == "fast" else _audited(model, pool)
    _compare(model, together, pool.alone(), f"{name} in transformers")


@torch.inference_mode()
def can_capture(model: TransformersForCausalLM) -> bool:
    """Whether a decode step can be captured as a CUDA graph, after `check_module`. If not, a warning says why: mixtures
    whose experts are multiplied one by one ask the device for numbers, for instance."""
    pool, device = _Pool(model), model.ops.device
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    inputs = pool.inputs([(0, 1), None, None])
    model(*inputs)  # compiles the kernels of such a step
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                model.compute_logits(model(*inputs))
            finally:
                graph.capture_end()
    except RuntimeError as error:
        logger.warning(
            "%s: decode steps are launched kernel by kernel, since transformers' module cannot be captured as a CUDA "
            "graph (%s)",
            model.spec.architecture,
            one_line(error),
        )
        return False
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
    return True


def _audited(model: TransformersForCausalLM, pool: _Pool) -> list[Tensor]:
    level = model.ops.name
    audit = CoverageAudit()
    model.layers.audit = audit
    try:
        with model.invariant(), audit:  # the mode first: inside the audit its own switches would be seen
            together = pool.step(WHOLE)
            model.compute_logits(torch.cat(together))
    except UncoveredOpError as error:
        ops = ", ".join(sorted(error.ops))
        raise ConfigError(
            f"numerics={level}: transformers' module of {model.spec.architecture} computes with ops whose result for a "
            f"row may depend on other rows: {ops}. Use batch_invariant=false"
        ) from error
    finally:
        model.layers.audit = None
    return together


def _compare(model: TransformersForCausalLM, together: list[Tensor], alone: list[Tensor], what: str) -> None:
    for one, other in zip(together, alone, strict=True):
        if model.ops.name == "fast":
            error = (one - other).float().norm(dim=-1) / one.float().norm(dim=-1)
            same = bool((error.median() <= FAST_ERROR) | one.isnan().any())
        else:
            same = torch.equal(one.nan_to_num(), other.nan_to_num())
        if not same:
            raise ConfigError(
                f"{what}: a sequence in a batch, or in parts, is not computed as it is alone, so the engine cannot "
                "serve it: it stores something other than keys and values, or mixes the rows of a batch"
            )


class _Pool:
    """A pool with room for the sequences, each on its own pages."""

    def __init__(self, model: TransformersForCausalLM) -> None:
        spec, ops = model.spec, model.ops
        pages = [-(-length // PAGE) for length in LENGTHS]
        self._model = model
        self._caches: list[KVCache] = []
        for layer in range(spec.num_layers):
            shape = (sum(pages), PAGE, *spec.heads_of(spec.block(layer))[1:])
            k, v = (torch.zeros(shape, dtype=ops.dtype, device=ops.device) for _ in range(2))
            self._caches.append((k, v))
        numbers = list(range(sum(pages)))
        self._pages = [numbers[sum(pages[:i]) : sum(pages[: i + 1])] for i in range(len(pages))]
        steps = np.arange(max(LENGTHS), dtype=np.int64)
        self._ids = [(17 + (7 + 2 * i) * steps[:length]) % spec.vocab_size for i, length in enumerate(LENGTHS)]

    def alone(self) -> list[Tensor]:
        """The sequences one by one, the second one in parts."""
        ends = np.cumsum(PARTS).tolist()
        parts = [self.step([None, (end - new, end), None])[0] for new, end in zip(PARTS, ends, strict=True)]
        return [
            self.step([(0, LENGTHS[0]), None, None])[0],
            torch.cat(parts),
            self.step([None, None, (0, LENGTHS[2])])[0],
        ]

    def step(self, spans: list[tuple[int, int] | None]) -> list[Tensor]:
        """Hidden states [tokens, H] of each sequence's tokens of a span, from its first to its end; None: not in it."""
        inputs = self.inputs(spans)
        return list(self._model(*inputs).split(inputs[3].query_lens))

    def inputs(self, spans: list[tuple[int, int] | None]) -> tuple[Tensor, Tensor, list[KVCache], AttentionMetadata]:
        """The model's arguments for such a step."""
        taken = [(i, *span) for i, span in enumerate(spans) if span is not None]
        new, lengths = [end - start for _, start, end in taken], [end for *_, end in taken]
        device = self._model.ops.device
        ids = np.concatenate([self._ids[i][start:end] for i, start, end in taken])
        input_ids, where = upload([ids, token_positions(new, lengths)], device)
        metadata = AttentionMetadata.build(new, lengths, [self._pages[i] for i, *_ in taken], PAGE, device)
        return input_ids, where, self._caches, metadata
