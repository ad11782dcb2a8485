"""The requests of a certificate: real text and random token ids, lengths on both sides of every page and chunk border.

Cases are a pure function of (effort, vocabulary, tokenizer): another process makes the same ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.text.encode import encode

TEXT = ("tinymath", "test.jsonl")  # a folder of the package's assets, and a file in it
CHOICES = (1, 2, 5, 9)  # lengths of the continuations that share a context, in tokens
SHORT_PROMPT = 64  # tokens of a short generation's prompt, at most
SHORT_TOKENS = 3  # tokens of a short generation: one by prefill, two by decode
MAX_POOL_TOKENS = 1 << 17


@dataclass(frozen=True)
class Effort:
    """The number of requests and schedules of a proof. Lengths are in tokens."""

    max_model_len: int
    scores: tuple[int, ...]  # lengths of scoring requests, context and continuation together
    prompts: tuple[int, ...]  # prompt lengths of the long generations
    long_tokens: int  # tokens that each long generation has
    short_generations: int
    neighbours: tuple[int, ...]
    max_steps: int  # steps of one schedule: a slow one (one sequence, few tokens a step) takes fewer requests
    orders: int
    mixed: int  # at least this many random schedules are run
    logprobs: int  # at least this many logprobs are compared in all
    documents: int  # documents of each task, if the caller sets no limit
    answer_tokens: int  # tokens generated for a document, if the caller sets no max_gen_toks


SHARED = (70, 122, 130)  # prompts with one or two whole blocks of 64 tokens, which equal prompts share (axis cascade)
BORDERS = (2, 16, 17, 18, 64, 65, 66, 128, 129, 257)  # page borders of 16, 64 and 256; one past the end is predicted
EFFORTS = {
    "quick": Effort(320, (2, 18, 65, 129, 257), (15, 60, *SHARED), 10, 6, (65, 300), 60, 1, 1, 0, 1, 10),
    "cpu": Effort(700, (*BORDERS, 701), (1, 15, 60, *SHARED, 250), 16, 24, (1, 63, 257), 100, 2, 2, 10_000, 4, 24),
    "gpu": Effort(
        max_model_len=3200,
        scores=(*BORDERS, 513, 1023, 1024, 1025, 1026, 1100, 2047, 2049, 2050, 3000, 3201),
        prompts=(1, 15, 16, 62, 64, *SHARED, 250, 511, 1015, 1020, 1024, 2040, 3000),
        long_tokens=16,
        short_generations=512,
        neighbours=(1, 63, 65, 257, 1025, 3200),
        max_steps=500,
        orders=3,
        mixed=4,
        logprobs=100_000,
        documents=64,
        answer_tokens=256,
    ),
}


@dataclass(frozen=True)
class Case:
    """A request whose answer is compared with the answer called `key`; None: a neighbour, whose answer is not."""

    key: int | None
    request: Request
    origin: str = ""  # "<task>, document <n>: "

    @property
    def prompt(self) -> list[int]:
        """The tokens that the request brings along, all of which are fed."""
        request = self.request
        if isinstance(request, GenerateRequest):
            return request.prompt_ids
        return request.context_ids + request.continuation_ids[:-1]

    @property
    def new_tokens(self) -> int:
        """Steps that the request takes alone, its prompt computed in one of them."""
        return self.request.params.max_tokens if isinstance(self.request, GenerateRequest) else 1

    @property
    def length(self) -> int:
        """Tokens whose KV is in the pool when the request ends."""
        return len(self.prompt) + self.new_tokens - 1

    @property
    def room(self) -> int:
        """The least `max_model_len` that takes the request: a generation's last token is not fed, but counts."""
        return self.length + isinstance(self.request, GenerateRequest)

    @property
    def what(self) -> str:
        if isinstance(self.request, GenerateRequest):
            return f"{self.origin}generation after {len(self.prompt)} tokens"
        scored, context = self.request.continuation_ids, self.request.context_ids
        return f"{self.origin}score of {len(scored)} tokens after {len(context)}"


def build_cases(effort: Effort, checkpoint: Checkpoint, room: int, more: Sequence[Case] = ()) -> list[Case]:
    """The effort's requests that fit into `room` tokens, and `more`: in a fixed mixed order, their keys and
    request ids 0, 1, ..."""
    cases = [
        Case(None, request) for request in _requests(effort, min(effort.max_model_len, room), _TokenSource(checkpoint))
    ]
    cases += more
    random.Random(1).shuffle(cases)
    return [replace(case, key=i, request=replace(case.request, request_id=i)) for i, case in enumerate(cases)]


def pool_pages(cases: list[Case], block_size: int) -> int:
    """Pages that hold every case at once, up to about `MAX_POOL_TOKENS` tokens."""
    pages = [-(-case.length // block_size) for case in cases]
    return max(min(sum(pages), MAX_POOL_TOKENS // block_size), max(pages)) + 1


def affordable(
    cases: list[Case],
    max_steps: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    new_tokens: Callable[[Case], int] = lambda case: case.new_tokens,
) -> list[Case]:
    """The cases, in order, that a schedule of these limits runs in about `max_steps` steps in all; at least one."""
    chosen: list[Case] = []
    spent = 0.0
    for case in cases:
        cost = len(case.prompt) / max_num_batched_tokens + new_tokens(case) / max_num_seqs
        if not chosen or spent + cost <= max_steps:
            chosen.append(case)
            spent += cost
    return chosen


class _TokenSource:
    """A source of token ids: each call returns, by turns, a window of real text or random ids."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._random = random.Random(0)
        self._vocab_size = checkpoint.spec.vocab_size
        self._text = _text_ids(checkpoint)
        self._count = 0

    def __call__(self, length: int) -> list[int]:
        self._count += 1
        if self._count % 2:
            first = self._random.randrange(len(self._text) - length)
            return self._text[first : first + length]
        return [self._random.randrange(self._vocab_size) for _ in range(length)]

    def length(self, limit: int) -> int:
        return self._random.randint(1, limit)


def _text_ids(checkpoint: Checkpoint) -> list[int]:
    """The bundled task's rows; a shape has no tokenizer and takes the bundled model's, whose ids any vocabulary has."""
    lines = (files("evalengine.assets") / TEXT[0] / TEXT[1]).read_text(encoding="utf-8").splitlines()
    rows = (json.loads(line) for line in lines)
    text = "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows)
    tokenizer = checkpoint.tokenizer or resolve_checkpoint(ModelConfig(path="asset:tinymath")).tokenizer
    return encode(tokenizer, text)


def _requests(effort: Effort, limit: int, tokens: _TokenSource) -> Iterator[Request]:
    for length in effort.scores:
        if length <= limit + 1:
            ids = tokens(length)
            first = max(1, length // 4)
            yield ScoreRequest(0, ids[:first], ids[first:])
    context = tokens(min(37, limit // 2))
    for length in CHOICES:
        yield ScoreRequest(0, context, tokens(length))
    for i, length in enumerate(effort.prompts):
        if length + effort.long_tokens <= limit:
            yield GenerateRequest(0, tokens(length), _sampling(effort.long_tokens, i % 3 == 2))
    for i in range(effort.short_generations):
        prompt = tokens(tokens.length(min(SHORT_PROMPT, limit // 2)))
        yield GenerateRequest(0, prompt, _sampling(SHORT_TOKENS, i % 8 == 7))


def _sampling(max_tokens: int, sampled: bool) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8 if sampled else 0.0, top_p=0.9, ignore_eos=True)
