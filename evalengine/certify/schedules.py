"""A schedule of a proof: which requests, under which settings, and whether what it varies really happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from evalengine.certify.cases import Case, Effort, affordable
from evalengine.engine.request import GenerateRequest, RequestOutput, ScoreRequest
from evalengine.engine.stats import EngineStats

LARGE = 1 << 16  # a limit of tokens in a step that no step reaches
ASKED = 5  # the logprobs reported for each position on the axis `asked`


@dataclass(frozen=True)
class ReferenceWorkload:
    """The requests, and the answer of each one alone."""

    cases: list[Case]
    reference: Mapping[int, RequestOutput]
    effort: Effort
    max_model_len: int
    vocab_size: int
    device_type: str
    has_graphs: bool = False  # the engine replays decode steps as CUDA graphs by default
    has_cascade: bool = False  # its attention can read the KV blocks that decodes share once for all of them
    has_states: bool = False  # some of the model's layers are recurrent
    can_guess: bool = True  # its states, if it has any, can drop wrong guesses
    ranks: Sequence[int] = ()  # other degrees of tensor parallelism that this machine can have

    def some(self, settings: Mapping[str, Any], cases: list[Case] | None = None) -> list[Case]:
        """As many of the cases as a schedule with these settings runs in `effort.max_steps` steps.

        cases: those to choose from; None: all.
        """
        seqs, budget = settings.get("max_num_seqs", LARGE), settings.get("max_num_batched_tokens", LARGE)
        return affordable(self.cases if cases is None else cases, self.effort.max_steps, seqs, budget, self._steps)

    def answer(self, case: Case) -> list[int]:
        """The token ids that the case has in the reference; none for a neighbour."""
        return [] if case.key is None else self.reference[case.key].token_ids

    def _steps(self, case: Case) -> int:
        """Steps of a case: those of its known answer, since a generation may end long before its limit."""
        is_known = case.key is not None and isinstance(case.request, GenerateRequest)
        return len(self.answer(case)) if is_known else case.new_tokens


@dataclass(frozen=True)
class Variant:
    """One way to run some of the cases."""

    label: str
    cases: list[Case]
    # Fields of EngineConfig; the pool holds all cases unless these fields set its size.
    settings: Mapping[str, Any] = field(default_factory=dict)
    passes: int = 1  # passes over the same cases with one prefix cache
    nan_pool: bool = False
    # (prompt, output) token ids that the engine takes as guesses: `Engine.learn_answers` after the reconfiguration
    learned: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    new_process: bool = False
    ranks: int | None = None  # processes that share the model; None: as many as the reference has
    busy: bool = False  # while another process computes on the device
    happened: Callable[[EngineStats], bool] = lambda stats: True  # whether the axis was really exercised
    wanted: str = ""  # in words, the event that `happened` looks for


@dataclass(frozen=True)
class Skip:
    """Why an axis has nothing to run here."""

    reason: str


def largest_batch(size: int) -> dict[str, Any]:
    return {"happened": lambda stats: stats.largest_batch == size, "wanted": f"{size} sequences in a step"}


def largest_step(budget: int) -> dict[str, Any]:
    return {"happened": lambda stats: 0 < stats.largest_step <= budget, "wanted": f"steps of {budget} tokens at most"}


def warm(cases: list[Case]) -> dict[str, Any]:
    """The check that a second pass hit the cache: at least half of all context tokens, more than a first pass
    shares."""
    half = sum(len(context(case)) for case in cases) // 2
    return {"happened": lambda stats: stats.num_cached_tokens >= half, "wanted": f"{half} cached tokens"}


def num_sequences(cases: list[Case]) -> int:
    """Sequences that can be in one step; scores of one context start as one sequence."""
    scores = {tuple(context(case)) for case in cases if isinstance(case.request, ScoreRequest)}
    return len(scores) + sum(isinstance(case.request, GenerateRequest) for case in cases)


def filled_pages(cases: list[Case], size: int) -> int:
    """Pages of `size` tokens that the first half of the prompts fill to the last one, or more until the longest case
    fits alone. Then the next sequence that grows takes a page from another one. Equal beginnings share their
    pages, as in the cache."""
    longest = max(-(-case.length // size) for case in cases)
    pages: set[tuple[int, ...]] = set()
    for number, case in enumerate(cases, 1):
        pages |= {tuple(case.prompt[: end + size]) for end in range(0, len(case.prompt), size)}
        if 2 * number >= len(cases) and len(pages) >= longest:
            break
    return max(len(pages), longest)


def context(case: Case) -> list[int]:
    return case.request.prompt_ids if isinstance(case.request, GenerateRequest) else case.request.context_ids


def asking(request: GenerateRequest | ScoreRequest) -> GenerateRequest | ScoreRequest:
    if isinstance(request, ScoreRequest):
        return replace(request, logprobs=ASKED)
    return replace(request, params=replace(request.params, logprobs=ASKED))


def siblings(cases: list[Case], count: int, tokens: int) -> list[Case]:
    """Every generation after `tokens` tokens or more, `count` times: such requests have whole blocks in common."""
    long = [c for c in cases if isinstance(c.request, GenerateRequest) and len(c.prompt) >= tokens]
    numbered = enumerate([case for case in long for _ in range(count)])
    return [replace(case, request=replace(case.request, request_id=i)) for i, case in numbered]


def shuffled(cases: list[Case], seed: int) -> list[Case]:
    cases = list(cases)
    random.Random(seed).shuffle(cases)
    return cases


def listing(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
