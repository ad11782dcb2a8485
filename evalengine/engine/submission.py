"""From requests to sequences: what is refused, and what is shared."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from evalengine.arguments import shown
from evalengine.engine.request import GenerateRequest, Request, SamplingParams, ScoreRequest
from evalengine.engine.sequence import PendingScore, Sequence, Target
from evalengine.errors import ConfigError

if TYPE_CHECKING:
    from evalengine.engine.engine import Engine

MAX_LISTED = 10


def check_requests(
    requests: SequenceOf[Request], engine: Engine, name: Callable[[Request], str] = lambda r: f"request {r.request_id}"
) -> None:
    """Raises ConfigError naming every request that can never run, before any does."""
    strangers = [r for r in requests if not isinstance(r, GenerateRequest | ScoreRequest)]
    if strangers:
        raise listed([f"requests: {shown(r)} is neither a GenerateRequest nor a ScoreRequest" for r in strangers])
    problems = []
    if len({r.request_id for r in requests}) != len(requests):
        problems.append("request_id: two requests have the same one")
    for request in requests:
        problem = _problem(request, engine)
        if problem:
            problems.append(f"{name(request)}: {problem}")
    if problems:
        raise listed(problems)


def listed(problems: list[str]) -> ConfigError:
    """All of them, or the first few and how many more there are."""
    more = [f"... and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
    return ConfigError([*problems[:MAX_LISTED], *more])


def _problem(request: Request, engine: Engine) -> str | None:
    limit, page, vocab_size = engine.settings.max_model_len, engine.settings.block_size, engine.spec.vocab_size
    if isinstance(request, GenerateRequest):
        ids, fed = request.prompt_ids, len(request.prompt_ids)
        longest = min(fed + request.params.max_tokens - 1, limit)
        if fed >= limit:
            return f"the prompt has {fed} tokens, engine.max_model_len={limit} leaves no room for a new one"
        if request.params.stop and engine.tokenizer is None:
            return "stop strings need a tokenizer, and this model has none (model.tokenizer)"
        if problem := _params_problem(request.params, vocab_size):
            return problem
    else:
        ids = request.context_ids + request.continuation_ids
        longest = fed = len(ids) - 1
        if not request.context_ids or not request.continuation_ids:
            return "the context and the continuation need at least one token each"
        if fed > limit:
            return f"context and continuation have {fed + 1} tokens, engine.max_model_len={limit}"
        if request.logprobs > vocab_size:
            return f"logprobs={request.logprobs}: the vocabulary has {vocab_size} tokens"
    if not ids:
        return "the prompt is empty; give at least one token"
    if not set(map(type, ids)) <= {int}:  # it was checked, but a list can be changed afterwards
        return "token ids must be integers; its list was changed after the request was made"
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        return f"token ids must lie in 0 ... {vocab_size - 1} (the tokenizer may not belong to the model)"
    pages = -(-longest // page)
    if pages > engine.num_kv_blocks:
        return (
            f"{longest} tokens need {pages} KV pages of {page} tokens, the pool has {engine.num_kv_blocks}; "
            "raise engine.num_kv_blocks, or leave it null"
        )
    return None


def _params_problem(params: SamplingParams, vocab_size: int) -> str | None:
    """What the model's vocabulary does not have."""
    if params.logprobs > vocab_size:
        return f"logprobs={params.logprobs}: the vocabulary has {vocab_size} tokens"
    if any(not 0 <= i < vocab_size for i in params.stop_token_ids or ()):
        return f"stop_token_ids={shown(params.stop_token_ids)}: token ids must lie in 0 ... {vocab_size - 1}"
    if params.processors is not None and params.processors.largest_token_id() >= vocab_size:
        return f"processors: they name token ids outside the vocabulary, 0 ... {vocab_size - 1}"
    return None


def to_sequences(requests: SequenceOf[Request], share_contexts: bool) -> list[Sequence]:
    """Sequences in the order of the requests.

    Score requests with equal contexts become one group at its first member's place: all first tokens are read from one
    forward pass over the context, the rest follow through the prefix cache.
    """
    groups: dict[tuple[int, ...], list[PendingScore]] = {}
    order: list[GenerateRequest | tuple[int, ...]] = []
    for request in requests:
        if isinstance(request, GenerateRequest):
            order.append(request)
            continue
        context = tuple(request.context_ids)
        if context not in groups:
            groups[context] = []
            order.append(context)
        groups[context].append(PendingScore(request))
    sequences: list[Sequence] = []
    for item in order:
        if isinstance(item, GenerateRequest):
            sequences.append(Sequence(list(item.prompt_ids), request=item))
        else:
            sequences.extend(_score_group(groups[item], share_contexts))
    return sequences


def _score_group(group: list[PendingScore], share_context: bool) -> list[Sequence]:
    # Without the prefix cache a longer continuation computes the context again anyway, so it keeps its first token.
    grouped = [len(group) > 1 and (share_context or len(_tokens(p)) == 1) for p in group]
    alone = [p for p, with_others in zip(group, grouped, strict=True) if not with_others]
    together = [p for p, with_others in zip(group, grouped, strict=True) if with_others]
    sequences = [_scoring(p, range(len(_tokens(p)))) for p in alone]
    if together:
        first = together[0].request
        parent = Sequence(list(first.context_ids), targets={})
        parent.targets[len(first.context_ids) - 1] = [Target(p, 0, _tokens(p)[0]) for p in together]
        parent.then = [_scoring(p, range(1, len(_tokens(p)))) for p in together if len(_tokens(p)) > 1]
        sequences.append(parent)
    return sequences


def _scoring(pending: PendingScore, indices: range) -> Sequence:
    """A sequence of context and continuation (its last token is predicted, never fed) that scores tokens `indices`."""
    request = pending.request
    before = len(request.context_ids) - 1
    targets = {before + i: [Target(pending, i, request.continuation_ids[i])] for i in indices}
    return Sequence(request.context_ids + request.continuation_ids[:-1], targets=targets)


def _tokens(pending: PendingScore) -> list[int]:
    return pending.request.continuation_ids
