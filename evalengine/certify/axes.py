"""The axes of a proof. Each yields schedules of the same requests; every answer must equal the request's answer alone.

The first line of an axis's docstring is in the certificate: what the axis varies, in at most 70 characters.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from evalengine.certify.cases import Case
from evalengine.certify.schedules import (
    ASKED,
    LARGE,
    ReferenceWorkload,
    Skip,
    Variant,
    asking,
    context,
    filled_pages,
    largest_batch,
    largest_step,
    listing,
    num_sequences,
    shuffled,
    siblings,
    warm,
)
from evalengine.engine.request import GenerateRequest, SamplingParams, ScoreRequest

BATCHES = (1, 2, 3, 8, 64, 256, 512)
BUDGETS = (17, 64, 100, 1000, 8192)
PAGES = (16, 64, 256)
Axis = Callable[[ReferenceWorkload], Iterator[Variant | Skip]]
_SEVERAL: dict[str, Any] = {"happened": lambda stats: stats.largest_batch > 1, "wanted": "several requests in a step"}
_NO_GUESS: dict[str, Any] = {"happened": lambda stats: not stats.num_guesses, "wanted": "no guess"}
_RIGHT: dict[str, Any] = {"happened": lambda stats: stats.num_right_guesses > 0, "wanted": "right guesses"}
_MOSTLY_RIGHT: dict[str, Any] = {
    "happened": lambda stats: 2 * stats.num_right_guesses > stats.num_guesses,
    "wanted": "mostly right guesses",
}
_RIGHT_AND_WRONG: dict[str, Any] = {
    "happened": lambda stats: 0 < stats.num_right_guesses < stats.num_guesses,
    "wanted": "right and wrong guesses",
}
_WRONG: dict[str, Any] = {
    "happened": lambda stats: stats.num_right_guesses < stats.num_guesses,
    "wanted": "wrong guesses",
}


def batch(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Number of sequences in a step."""
    for size in BATCHES:
        if size <= len(work.cases):
            settings = {"max_num_seqs": size, "max_num_batched_tokens": LARGE}
            cases = work.some(settings)
            yield Variant(f"max_num_seqs={size}", cases, settings, **largest_batch(min(size, num_sequences(cases))))


def order(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Order of the requests."""
    for seed in range(2, 2 + work.effort.orders):
        cases = shuffled(work.cases, seed)
        yield Variant(f"order {seed}", cases, {"max_num_seqs": 64}, **_SEVERAL)


def neighbours(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Unrelated requests in the same steps.

    Kernels that choose their tiles by the longest query would change an unrelated row.
    """
    rng = random.Random(3)
    for length in work.effort.neighbours:
        length = min(length, work.max_model_len)
        mixed: list[Case] = []
        for i, case in enumerate(work.cases):
            if i % max(4, length // 16) == 0:
                prompt = [rng.randrange(work.vocab_size) for _ in range(length)]
                mixed.append(Case(None, ScoreRequest(-1 - i, prompt, [rng.randrange(work.vocab_size)])))
            mixed.append(case)
        settings = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}
        yield Variant(f"neighbours of {length} tokens", mixed, settings, **_SEVERAL)


def chunks(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Number of tokens in a step, which splits prompts at other places.

    Chunk borders are inside pages and inside the KV chunks of the attention.
    """
    for budget in BUDGETS:
        settings = {"max_num_seqs": 64, "max_num_batched_tokens": budget}
        yield Variant(f"max_num_batched_tokens={budget}", work.some(settings), settings, **largest_step(budget))


def prefix(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Prefix cache: off, cold, warm, and hits inside a page.

    Recurrent states: off, and copies of a state from inside a page.
    """
    off = {"enable_prefix_caching": False}
    yield Variant(
        "no prefix cache", work.cases, off, happened=lambda s: not s.num_cached_tokens, wanted="computing all"
    )
    if work.has_states:
        yield from _from_states(work)
        return
    yield Variant("cold and warm", work.cases, {}, 2, **warm(work.cases))
    small = {"max_num_seqs": 64, "max_num_batched_tokens": 100}
    cases = work.some(small)
    yield Variant("warm, chunks of 100", cases, {**small, "block_size": 16}, 2, **warm(cases))
    yield _inside_a_page(work)


def preemption(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """A KV pool so small that running sequences are preempted."""
    generations = sorted((case for case in work.cases if case.new_tokens > 1), key=lambda case: -len(case.prompt) % 16)
    pool = filled_pages(generations, 16)
    settings: dict[str, Any] = {"block_size": 16, "num_kv_blocks": pool}
    at_once = {**settings, "max_num_seqs": 512, "max_num_batched_tokens": LARGE}  # The pool is full after one step.
    yield Variant(
        f"generations in {pool} pages of 16",
        generations,
        at_once,
        happened=lambda stats: stats.num_preemptions > 0,
        wanted="a preemption",
    )
    pool = max(-(-case.length // 16) for case in work.cases)
    settings = {**settings, "num_kv_blocks": pool}
    yield Variant(
        f"everything in {pool} pages of 16",
        work.cases,
        settings,
        happened=lambda stats: stats.largest_batch < num_sequences(work.cases),
        wanted="a request that waits for pages",
    )


def pages(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Number of tokens in a KV page."""
    for size in PAGES:
        yield Variant(f"block_size={size}", work.cases, {"block_size": size, "max_num_batched_tokens": 1000})


def decode(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Prefill against decode of the same tokens.

    Generated tokens are scored, and scored tokens are fed one per step.
    """
    scores = []
    for case in work.cases:
        if case.key is not None and isinstance(case.request, GenerateRequest):
            answer = work.reference[case.key]
            scores.append(replace(case, request=ScoreRequest(case.key, case.request.prompt_ids, answer.token_ids)))
    yield Variant("score what was generated", scores, {"max_num_batched_tokens": 1000})
    one = {"max_num_batched_tokens": 1, "enable_prefix_caching": False}
    yield Variant("one token a step", work.some(one), one, **largest_step(1))


def asked(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Number of top logprobs that are reported."""
    yield Variant(f"logprobs={ASKED}", [replace(case, request=asking(case.request)) for case in work.cases])


def ids(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Request ids."""
    cases = [replace(c, request=replace(c.request, request_id=10**9 - 7919 * i)) for i, c in enumerate(work.cases)]
    yield Variant("other request ids", cases)


def nan(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """A KV pool filled with NaN: unwritten slots must not be read."""
    for size in PAGES:
        yield Variant(f"block_size={size}", work.cases, {"block_size": size}, nan_pool=True)


def threads(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Number of CPU threads."""
    if work.device_type != "cpu":
        yield Skip("varied on a CPU only")
        return
    for number in (1, 2):
        yield Variant(f"num_threads={number}", work.cases, {"num_threads": number})


def graphs(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """CUDA graphs against eager launches.

    In two passes: a graph is captured when a step of its size comes again.
    """
    if not work.has_graphs:
        yield Skip("no CUDA graphs at this numerics level on this device")
        return
    eager: dict[str, Any] = {"happened": lambda stats: stats.num_graph_steps == 0, "wanted": "no graph"}
    yield Variant("enforce_eager=true", work.cases, {"enforce_eager": True}, passes=2, **eager)
    replayed: dict[str, Any] = {
        "happened": lambda stats: stats.num_graph_steps > 0 and 0 < stats.num_steps_ahead < stats.num_steps,
        "wanted": "replayed graphs, some launched ahead and some not",
    }
    for size in (1, 7, 256):
        settings = {"enforce_eager": False, "max_num_seqs": size}
        cases = work.some(settings)
        yield Variant(f"graphs, max_num_seqs={size}", cases, settings, passes=2, **replayed)


def cascade(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Shared prefixes read once for all sequences, or once for each.

    Equal prompts run together, eagerly and by CUDA graphs.
    """
    if not work.has_cascade:
        yield Skip("needs the Triton attention kernel and a layer without a sliding window")
        return
    cases = siblings(work.cases, 5, 65)
    if not cases:
        yield Skip("engine.max_model_len is too small for prompts with a whole block of 64 tokens")
        return
    each: dict[str, Any] = {"happened": lambda stats: not stats.num_cascade_steps, "wanted": "no shared read"}
    once: dict[str, Any] = {"happened": lambda stats: stats.num_cascade_steps > 0, "wanted": "a shared read"}
    off, always = ({"cascade_attention": word, "max_num_seqs": 64} for word in ("off", "always"))
    yield Variant("read for each", cases, off, **each)
    yield Variant("read once", cases, always, passes=2, **once)
    eager = {**always, "enforce_eager": True, "block_size": 16, "max_num_seqs": 17}
    yield Variant("read once, pages of 16", cases, eager, **once)


def speculation(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Guessed tokens: none, right ones and wrong ones.

    The model's weights may be random, so right guesses are answers that are known: a sibling's (an equal request that
    ran before), or the request's answer alone.
    """
    if not work.can_guess:
        yield Skip("nothing is guessed: recurrent states that are updated token by token cannot drop a wrong guess")
        return
    for size, page in ((2, 64), (3, 16)):  # Of four siblings, the last one runs after answers that it can guess from.
        settings = {"speculation": "always", "max_num_seqs": size, "block_size": page}
        cases = work.some(settings, siblings(_with_guesses(work), 4, 1))
        if size == 2:
            yield Variant("no guesses", cases, {**settings, "speculation": "off"}, **_NO_GUESS)
        yield Variant(f"siblings, max_num_seqs={size}", cases, settings, nan_pool=True, **_RIGHT)
    yield from _learned(work)


def tensor_parallel(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Number of tensor-parallel ranks.

    Each rank has other columns of every product, other heads and other token ids.
    """
    if not work.ranks:
        yield Skip("no other number of devices here can share this model")
        return
    for ranks in work.ranks:
        settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 1000}
        yield Variant(f"tensor_parallel_size={ranks}", work.cases, settings, passes=2, ranks=ranks, **_SEVERAL)
        one = {"max_num_seqs": 1, "enforce_eager": True}
        yield Variant(f"tensor_parallel_size={ranks}, {listing(one)}", work.some(one), one, ranks=ranks)


def busy(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """A second process that keeps the GPU busy.

    The GPU interrupts kernels and resumes them.
    """
    if work.device_type != "cuda":
        yield Skip("varied on a GPU only")
        return
    settings = {"max_num_seqs": 64, "enable_prefix_caching": False}
    yield Variant("a busy neighbour", work.cases, settings, passes=4, busy=True, **_SEVERAL)


def mixed(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """Random combinations of these settings.

    Endless: the caller decides when enough is compared.
    """
    for number in count(1):
        rng = random.Random(number)
        settings = {
            "max_num_seqs": rng.choice(BATCHES[2:]),
            "max_num_batched_tokens": rng.choice(BUDGETS[1:]),
            "block_size": rng.choice(PAGES),
            "enable_prefix_caching": rng.random() < 0.7,
        }
        cases = shuffled(work.some(settings), number)
        yield Variant(f"random {number}: {listing(settings)}", cases, settings, nan_pool=rng.random() < 0.5)


def restart(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """A new process."""
    yield Variant("a new process", work.cases, new_process=True)


MIXED = "mixed"
AXES: dict[str, Axis] = {
    function.__name__: function
    for function in (
        *(batch, order, neighbours, chunks, prefix, preemption, pages, decode, asked, ids, nan, threads, graphs),
        *(cascade, speculation, tensor_parallel, busy, mixed, restart),
    )
}


def control(work: ReferenceWorkload) -> Iterator[Variant | Skip]:
    """The schedules of the negative control: what an ordinary engine's bits depend on."""
    one = {"max_num_seqs": 3, "max_num_batched_tokens": 100}
    yield Variant("all at once", work.cases, {"max_num_seqs": 512, "max_num_batched_tokens": LARGE})
    yield Variant("order 2", shuffled(work.cases, 2), {"max_num_seqs": 64, "max_num_batched_tokens": 1000})
    yield Variant("small chunks", work.some(one), one)


def _with_guesses(work: ReferenceWorkload) -> list[Case]:
    """Generations whose answers are long enough for guesses, the shortest first: a slow schedule finishes several."""
    found = [case for case in work.cases if isinstance(case.request, GenerateRequest) and len(work.answer(case)) > 3]
    return sorted(found, key=lambda case: len(work.answer(case)))


def _learned(work: ReferenceWorkload) -> Iterator[Variant]:
    """The reference's answers as guesses: unchanged, with wrong tokens, and exchanged between requests."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": LARGE, "speculation": "always"}
    cases = work.some(settings, _with_guesses(work))
    answers = [work.answer(case) for case in cases]
    own = [(case.prompt, answer) for case, answer in zip(cases, answers, strict=True)]
    for word in ("always", "auto"):
        schedule = {**settings, "speculation": word}
        label = f"learned answers, speculation={word}"
        yield Variant(label, cases, schedule, nan_pool=True, learned=own, **_MOSTLY_RIGHT)
    changed = [(prompt, _with_wrong_tokens(answer, work.vocab_size)) for prompt, answer in own]
    label = "learned answers with wrong tokens"
    yield Variant(label, cases, settings, 2, nan_pool=True, learned=changed, **_RIGHT_AND_WRONG)
    # The first token is the request's: an answer that disagrees from the start is not guessed. The next one is wrong.
    exchanged = []
    for i, (prompt, answer) in enumerate(own):
        others = [other for other in answers[i:] + answers[:i] if other[1] != answer[1]]
        exchanged += [(prompt, [answer[0], *other[1:]]) for other in others[:1]]
    if exchanged:  # a model that gives every request one answer has no others
        yield Variant("learned answers of other requests", cases, settings, nan_pool=True, learned=exchanged, **_WRONG)


def _with_wrong_tokens(answer: list[int], vocab_size: int) -> list[int]:
    """The answer with a wrong token after each right guess or two: guesses resume once eight tokens agree."""
    return [(token + 1) % vocab_size if i % 11 == 2 else token for i, token in enumerate(answer)]


def _from_states(work: ReferenceWorkload) -> Iterator[Variant]:
    """Every generation twice: the second begins with a copy of the state that the first one leaves behind all of the
    prompt but its last token, mostly inside a page."""
    for settings in ({"max_num_seqs": 64, "max_num_batched_tokens": LARGE}, {"max_num_batched_tokens": 100}):
        cases = siblings(work.some(settings), 2, 17)
        copied = sum(len(case.prompt) - 1 for case in cases[::2])
        yield Variant(
            f"twice each, {listing(settings)}",
            cases,
            {**settings, "block_size": 16},
            happened=lambda stats, copied=copied: stats.num_cached_tokens >= copied > 0,  # type: ignore[misc]
            wanted=f"{copied} cached tokens",
        )


def _inside_a_page(work: ReferenceWorkload) -> Variant:
    """Runs, before each case, a request that shares its first tokens up to inside a page of 16; each is alone in its
    batch."""
    settings = {"max_num_seqs": 1, "block_size": 16, "max_num_batched_tokens": LARGE}
    contexts = Counter(tuple(context(case)) for case in work.cases)
    cases: list[Case] = []
    shared = 0
    for case in work.some({"max_num_seqs": 1}):
        context_ids = context(case)
        # The request shares all but the last token, or two thirds.
        length = len(context_ids) - 1 if len(cases) % 4 else 2 * len(context_ids) // 3
        length -= length % 16 == 0
        if length > 0 and contexts[tuple(context_ids)] == 1:
            prompt = [*context_ids[:length], (context_ids[length] + 1) % work.vocab_size]
            cases.append(Case(None, GenerateRequest(-1 - len(cases), prompt, SamplingParams(max_tokens=1))))
            cases.append(case)
            shared += length
    return Variant(
        "hit inside a page",
        cases,
        settings,
        happened=lambda stats: stats.num_cached_tokens >= shared,
        wanted=f"{shared} cached tokens, page tails among them",
    )
