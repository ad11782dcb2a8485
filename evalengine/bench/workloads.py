"""The workloads of `bench throughput`: lists of token-id requests, seeded, the same for every engine and mode.

    random      256 generations of 100 ... 1,024 tokens after as many, nothing shared (144,628 in, 133,292 out)
    batch1      one generation of 256 tokens after 1,024
    long        16 generations of 128 tokens after 16,384
    gsm8k_cot   512 generations of 256 tokens after about 80 of their own, behind the same 8 exemplars of about 100
    <name>      a file's (`workload_files`): gsm8k, mmlu, hellaswag, ...

`random` makes the very requests with which other engines were run: `rng = random.Random(0)`; for each request
`n = rng.randint(100, 1024)`, n ids `rng.randrange(10, 151936)`, `max_tokens = min(rng.randint(100, 1024), 4096 - n)`.
Ids are taken modulo a smaller vocabulary, and lengths cut to what the model takes; how many were cut is written down.

The warm-up consists of other requests: those of another seed, or a file's last ones with every id one higher.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evalengine.bench.workload_files import generation, read_workload
from evalengine.engine.request import GenerateRequest, Request, ScoreRequest

VOCAB_SIZE = 151936  # the seeded ids are below this
MOST_WARM_UP = 256  # the most requests of a warm-up
SHORTEST, LONGEST, WINDOW = 100, 1024, 4096  # tokens of `random`
# (preset, workload) -> how many of its first requests run
CUTS: Mapping[tuple[str, str], int] = {("qwen3-8b", "gsm8k"): 256, ("qwen3.5-4b", "gsm8k"): 256}


@dataclass(frozen=True)
class Workload:
    """Requests to time and others to warm up with, all within the model's limits. Ids count from 0."""

    name: str
    requests: list[Request]
    warm_up: list[Request]
    num_cut: int = 0  # requests that had to be shortened

    @property
    def generates(self) -> bool:
        return any(isinstance(r, GenerateRequest) for r in self.requests)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, contexts and continuations."""
        return sum(len(r.prompt_ids) if isinstance(r, GenerateRequest) else _score_length(r) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens to be generated."""
        return sum(r.params.max_tokens for r in self.requests if isinstance(r, GenerateRequest))

    def blocks(self, block_size: int, max_num_seqs: int) -> int:
        """KV pages of the largest `max_num_seqs` requests, which may all run at once."""
        pages = sorted((-(-num_tokens(r) // block_size) for r in self.requests), reverse=True)
        return sum(pages[:max_num_seqs])


def num_tokens(request: Request) -> int:
    """All tokens of a request, those to be generated included."""
    if isinstance(request, GenerateRequest):
        return len(request.prompt_ids) + request.params.max_tokens
    return _score_length(request)


def make_workload(
    name: str, files: Mapping[str, Path], preset: str, vocab_size: int, max_model_len: int, most: int | None
) -> Workload:
    """most: requests to keep; None: all, or as many as `CUTS` has for the preset. Raises ConfigError for a bad file."""
    if name in files:
        everything = read_workload(files[name], vocab_size)
        others = [_mapped(r, 1, vocab_size) for r in everything[-MOST_WARM_UP:]]
    else:
        everything = [_mapped(r, 0, vocab_size) for r in IN_CODE[name](0)]
        others = [_mapped(r, 0, vocab_size) for r in IN_CODE[name](1)]
    requests = everything[: most or CUTS.get((preset, name))]
    fitting, num_cut = fitted(requests, max_model_len)
    warm_up, _ = fitted(others[-min(MOST_WARM_UP, len(requests)) :], max_model_len)
    return Workload(name, fitting, [replace(r, request_id=i) for i, r in enumerate(warm_up)], num_cut)


def fitted(requests: Sequence[Request], limit: int) -> tuple[list[Request], int]:
    """Requests of at most `limit` tokens, and how many had to be cut: a prompt's end, then what is generated after it;
    a context's beginning, or all but one token of it and the continuation's end."""
    fitting = [_fitted(r, limit) for r in requests]
    return fitting, sum(new is not old for new, old in zip(fitting, requests, strict=True))


def _fitted(request: Request, limit: int) -> Request:
    if num_tokens(request) <= limit:
        return request
    if isinstance(request, ScoreRequest):
        continuation = request.continuation_ids[: limit - 1]
        context = request.context_ids[-(limit - len(continuation)) :]
        return ScoreRequest(request.request_id, context, continuation)
    prompt = request.prompt_ids[: max(limit // 2, limit - request.params.max_tokens)]
    return generation(request.request_id, prompt, limit - len(prompt))


def _mapped(request: Request, shift: int, vocab_size: int) -> Request:
    """The request with every id raised by `shift`, modulo the vocabulary."""

    def ids(old: list[int]) -> list[int]:
        return [(i + shift) % vocab_size for i in old]

    if isinstance(request, GenerateRequest):
        return replace(request, prompt_ids=ids(request.prompt_ids))
    return replace(request, context_ids=ids(request.context_ids), continuation_ids=ids(request.continuation_ids))


def _score_length(request: ScoreRequest) -> int:
    return len(request.context_ids) + len(request.continuation_ids)


# -- in code ---------------------------------------------------------------------------------------------------------


def _random(seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests: list[Request] = []
    for i in range(256):
        prompt = _draw(rng, rng.randint(SHORTEST, LONGEST))
        requests.append(generation(i, prompt, min(rng.randint(SHORTEST, LONGEST), WINDOW - len(prompt))))
    return requests


def _batch1(seed: int) -> list[Request]:
    return [generation(0, _draw(random.Random(seed), 1024), 256)]


def _long(seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [generation(i, _draw(rng, 16384), 128) for i in range(16)]


def _gsm8k_cot(seed: int) -> list[Request]:
    rng = random.Random(seed)
    exemplars = [token for _ in range(8) for token in _draw(rng, rng.randint(80, 120))]
    return [generation(i, exemplars + _draw(rng, rng.randint(60, 100)), 256) for i in range(512)]


def _draw(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(count)]


IN_CODE = {"random": _random, "batch1": _batch1, "long": _long, "gsm8k_cot": _gsm8k_cot}
