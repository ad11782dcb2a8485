"""Checks requests and turns them into sequences, which share the contexts that are equal."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from evalengine.config.schema import EngineConfig
from evalengine.engine.execute.processing import Processing
from evalengine.engine.kv_layout import ONE_TABLE, KVLayout, kv_layout
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.schedule.scoring import PendingScore, Scoring
from evalengine.engine.schedule.sequence import Generating, Sequence
from evalengine.engine.settings import Settings
from evalengine.engine.text.detokenizer import Detokenizer
from evalengine.engine.text.grammar import compiled, library
from evalengine.errors import ConfigError, first_of
from evalengine.models.processors import RequestProcessors
from evalengine.models.spec import ModelSpec
from evalengine.records.schema import Answer
from evalengine.util.validation import shown

MAX_LISTED = 10


@dataclass(frozen=True)
class RequestLimits:
    """The sizes of model, settings and pool that bound a request."""

    max_model_len: int  # tokens
    vocab_size: int
    block_size: int  # tokens
    num_kv_blocks: int
    has_tokenizer: bool
    layout: KVLayout = ONE_TABLE
    largest_step: int = 1  # tokens

    def blocks_for(self, num_tokens: int) -> int:
        """How much of the pool one sequence of so many tokens takes at most."""
        return self.layout.blocks_for(num_tokens, self.block_size, self.largest_step)


def request_limits(
    spec: ModelSpec, settings: Settings, config: EngineConfig, num_kv_blocks: int, has_tokenizer: bool
) -> RequestLimits:
    """The bounds of the requests that an engine can run."""
    return RequestLimits(
        settings.max_model_len,
        spec.vocab_size,
        settings.block_size,
        num_kv_blocks,
        has_tokenizer,
        kv_layout(spec, settings),
        config.max_num_batched_tokens,
    )


def check_requests(
    requests: SequenceOf[Request],
    limits: RequestLimits,
    name: Callable[[Request], str] = lambda r: f"request {r.request_id}",
) -> None:
    """Raises ConfigError that names every request that can never run, before any request does."""
    strangers = [r for r in requests if not isinstance(r, GenerateRequest | ScoreRequest)]
    if strangers:
        raise refused([f"requests: {shown(r)} is neither a GenerateRequest nor a ScoreRequest" for r in strangers])
    problems = []
    if len({r.request_id for r in requests}) != len(requests):
        problems.append("request_id: two requests have the same one")
    last_context: list[int] = []  # checked already; choices of one document follow one another
    for request in requests:
        alike = isinstance(request, ScoreRequest) and (
            request.context_ids is last_context or request.context_ids == last_context
        )
        problem = _problem(request, limits, alike)
        if problem:
            problems.append(f"{name(request)}: {problem}")
        elif isinstance(request, ScoreRequest):
            last_context = request.context_ids
    if problems:
        raise refused(problems)


def refused(problems: list[str]) -> ConfigError:
    """An error with all problems, or with the first few and how many more there are."""
    return ConfigError(first_of(problems, MAX_LISTED))


def _problem(request: Request, limits: RequestLimits, known_context: bool) -> str | None:
    """Why the request can never run; None if it can.

    known_context: whether its context's token ids have been found to be in the vocabulary.
    """
    limit = limits.max_model_len
    if isinstance(request, GenerateRequest):
        ids, fed, processors = request.prompt_ids, len(request.prompt_ids), request.params.processors
        longest = min(fed + request.params.max_tokens - 1, limit)
        if fed >= limit:
            return f"the prompt has {fed} tokens, engine.max_model_len={limit} leaves no room for a new one"
        if not limits.has_tokenizer and (request.params.stop or request.params.think_end_token is not None):
            needing = "stop strings need" if request.params.stop else "think_end_token needs"
            return f"{needing} a tokenizer, and this model has none (model.tokenizer)"
        if not limits.has_tokenizer and isinstance(processors, RequestProcessors) and processors.grammar:
            return "processors.grammar needs a tokenizer, and this model has none (model.tokenizer)"
        if problem := _params_problem(request.params, limits.vocab_size):
            return problem
        if not ids:
            return "the prompt is empty; give at least one token"
    else:
        ids = request.continuation_ids if known_context else request.context_ids + request.continuation_ids
        longest = fed = len(request.context_ids) + len(request.continuation_ids) - 1
        if not request.context_ids or not request.continuation_ids:
            return "the context and the continuation need at least one token each"
        if fed > limit:
            return f"context and continuation have {fed + 1} tokens, engine.max_model_len={limit}"
        if request.logprobs > limits.vocab_size:
            return f"logprobs={request.logprobs}: the vocabulary has {limits.vocab_size} tokens"
    if not set(map(type, ids)) <= {int}:  # the request has checked them, but a list can be changed afterwards
        return "token ids must be integers; its list was changed after the request was made"
    if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        return f"token ids must be in 0 ... {limits.vocab_size - 1} (the tokenizer may not belong to the model)"
    pages = limits.blocks_for(longest)
    if pages > limits.num_kv_blocks:
        return (
            f"{longest} tokens need {pages} KV pages of {limits.block_size} tokens, the pool has "
            f"{limits.num_kv_blocks}; raise engine.num_kv_blocks, or leave it null"
        )
    return None


def _params_problem(params: SamplingParams, vocab_size: int) -> str | None:
    """Why sampling parameters do not fit the vocabulary; None if they do."""
    if params.logprobs > vocab_size:
        return f"logprobs={params.logprobs}: the vocabulary has {vocab_size} tokens"
    if any(not 0 <= i < vocab_size for i in params.stop_token_ids or ()):
        return f"stop_token_ids={shown(params.stop_token_ids)}: token ids must be in 0 ... {vocab_size - 1}"
    if isinstance(params.think_end_token, int) and not 0 <= params.think_end_token < vocab_size:
        return f"think_end_token={params.think_end_token}: token ids must be in 0 ... {vocab_size - 1}"
    if params.processors is not None and params.processors.largest_token_id() >= vocab_size:
        return f"processors: they name token ids outside the vocabulary, 0 ... {vocab_size - 1}"
    if isinstance(params.processors, RequestProcessors) and params.processors.grammar:
        needed, here = params.processors.grammar_library, library()
        if needed != here:
            return (
                f"processors.grammar_library={needed!r}: this machine has {here or 'no llguidance'}; install the former"
            )
        if params.ignore_eos:
            return "ignore_eos=true: an answer with a grammar ends where it is whole"
    return None


def to_sequences(
    requests: SequenceOf[Request],
    share_contexts: bool,
    generating: Callable[[GenerateRequest], Generating],
    short_positions: int = 0,
) -> list[Sequence]:
    """Sequences in the order of the requests; `generating` makes those of generate requests. short_positions:
    `ModelSpec.short_positions`.

    Score requests with equal contexts become one group at its first member's place: all first tokens are read from one
    forward pass over the context, the rest follow through the prefix cache.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[PendingScore]] = {}
    order: list[GenerateRequest | list[PendingScore]] = []
    group: list[PendingScore] = []
    for request in requests:
        if isinstance(request, GenerateRequest):
            order.append(request)
            continue
        pending = PendingScore(request, _rope_start(len(_fed(request)), short_positions))
        if not group or not _alike(group[0], pending):  # choices mostly follow one another
            group = groups.setdefault((pending.rope_start, tuple(request.context_ids)), [])
            if not group:
                order.append(group)
        group.append(pending)
    sequences: list[Sequence] = []
    for item in order:
        if isinstance(item, GenerateRequest):
            sequences.append(generating(item))
        else:
            sequences.extend(_score_group(item, share_contexts))
    return sequences


def generating_sequence(
    request: GenerateRequest, spec: ModelSpec, tokenizer: Any | None, max_model_len: int
) -> Generating:
    """The sequence of a generate request, with the state for choosing its tokens and for its text.

    max_model_len: tokens that prompt and output may have together. tokenizer: None for a model without one.
    """
    params = request.params
    ends = spec.eos_token_ids if params.stop_token_ids is None else params.stop_token_ids
    room = max_model_len - len(request.prompt_ids)
    seq = Generating(
        list(request.prompt_ids),
        request=request,
        max_output_tokens=min(params.max_tokens, room),
        stop_ids=frozenset() if params.ignore_eos else frozenset(ends),
    )
    seq.rope_start = _rope_start(seq.num_prompt_tokens + seq.max_output_tokens, spec.short_positions(max_model_len))
    if tokenizer is not None:
        seq.detokenizer = Detokenizer(tokenizer, params)
    processors = spec.processors if params.processors is None else params.processors
    if processors.in_force():
        constraint = None
        if isinstance(processors, RequestProcessors) and processors.grammar:
            try:
                grammar = compiled(tokenizer, processors.grammar, spec.vocab_size, spec.eos_token_ids)
            except ValueError as error:
                raise ConfigError(f"processors.grammar: llguidance cannot read the tokenizer: {error}") from error
            constraint = grammar.constraint(spec.vocab_size, ends, processors.grammar_after)
        seq.processing = Processing(processors, ends, seq.num_prompt_tokens, constraint)
    if request.partial is not None:
        _restore(seq, request.partial)
    return seq


def _restore(seq: Generating, partial: Answer) -> None:
    """Restore a partially generated sequence, as one that was preempted there."""
    assert len(partial.output_ids) == len(partial.logprobs) < seq.max_output_tokens, "it has ended"
    seq.token_ids += partial.output_ids
    seq.logprobs += partial.logprobs.tolist()
    seq.top += [{} for _ in partial.output_ids]
    seq.all_greedy = partial.is_greedy
    for token in partial.output_ids if seq.detokenizer is not None else ():
        stopped = seq.detokenizer.stops_at(token)
        assert not stopped, "it has ended"


def _score_group(group: list[PendingScore], share_context: bool) -> list[Scoring]:
    """The sequences of score requests with one context."""
    # Without the prefix cache a longer continuation computes the context again anyway, so it keeps its first token.
    grouped = [len(group) > 1 and (share_context or len(_tokens(p)) == 1) for p in group]
    alone = [p for p, with_others in zip(group, grouped, strict=True) if not with_others]
    together = [p for p, with_others in zip(group, grouped, strict=True) if with_others]
    sequences = [_scoring(p, 0) for p in alone]
    if together:
        firsts = np.array([_tokens(p)[0] for p in together], dtype=np.int64)
        rest = [_scoring(p, 1) for p in together if len(_tokens(p)) > 1]
        context = list(together[0].request.context_ids)
        common = Scoring(context, pending=together, targets=firsts, first_index=0, children=rest)
        common.rope_start = together[0].rope_start
        sequences.append(common)
    return sequences


def _scoring(pending: PendingScore, first_index: int) -> Scoring:
    """A sequence of context and continuation (its last token is predicted, never fed) that scores the tokens from
    number `first_index` on."""
    request = pending.request
    targets = np.array(request.continuation_ids[first_index:], dtype=np.int64)
    seq = Scoring(_fed(request), pending=[pending], targets=targets, first_index=first_index)
    seq.rope_start = pending.rope_start
    return seq


def _fed(request: ScoreRequest) -> list[int]:
    return request.context_ids + request.continuation_ids[:-1]


def _alike(a: PendingScore, b: PendingScore) -> bool:
    """Whether the keys and values of one's context are the other's."""
    return a.rope_start == b.rope_start and a.request.context_ids == b.request.context_ids


def _rope_start(num_tokens: int, short_positions: int) -> int:
    """`Sequence.rope_start` of a request that may have so many tokens in all: a matter of the request alone."""
    return short_positions if num_tokens > short_positions else 0


def _tokens(pending: PendingScore) -> list[int]:
    return pending.request.continuation_ids
