"""Grammars that an answer follows, by llguidance: the answer's tokens alone determine which may come next.

llguidance bounds each step by fuel, and what an earlier step has cached costs none. A matcher's `deep_copy` shares the
cache. So every sequence has a matcher that is built anew, and computes the mask at every token, also where it replays
tokens: the step at which a limit is hit is then the same on every schedule.

Building a grammar has no bound in llguidance, and a grammar may come from a client or with a receipt. So each is first
built in a separate process, which runs this file by its path and imports nothing of evalengine: it reads lines
{"grammar"} and answers each {"error"} within `SECONDS` of CPU time and `BYTES` of memory, or ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

SECONDS, BYTES = 0.5, 1 << 30


def library() -> str | None:
    """The library that computes masks, with its version; None if it is not installed."""
    try:
        return f"llguidance {version('llguidance')}"
    except PackageNotFoundError:
        return None


class Grammar:
    """A grammar that is compiled for one model's tokens. `error` says why it cannot be; else empty."""

    def __init__(self, tokens: Any, text: str) -> None:
        """tokens: what `token_table` gave. text: Lark, in llguidance's dialect."""
        self._tokens, self._text = tokens, text
        self._ready: deque[Any] = deque()
        self.error = _error_of(text)
        self.error = self.error or self.matcher().get_error()

    def begins(self) -> bool:
        """Whether any token can come first."""
        matcher = self.matcher()
        return any(matcher.compute_bitmask()) and not matcher.is_error()

    def constraint(self, vocab_size: int, end_ids: Sequence[int], after: int | None) -> Constraint:
        """The grammar's hold on one sequence. end_ids: tokens that end an answer. after: see `Constraint`."""
        return Constraint(self, self._tokens.eos_tokens, vocab_size, end_ids, after)

    def prepare(self, count: int) -> None:
        """Builds matchers for so many sequences now, in the caller's thread instead of the engine's."""
        self._ready += [self._built() for _ in range(count)]

    def matcher(self) -> Any:
        """A matcher at the grammar's beginning, which shares nothing with others."""
        try:
            return self._ready.popleft()
        except IndexError:
            return self._built()

    def _built(self) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(self._tokens, "" if self.error else self._text, log_level=0, limits=_limits())


class Constraint:
    """One sequence's place in its grammar.

    An end token is allowed exactly where the answer is whole. With `after`, a token id, the grammar applies to what
    follows the first such token, which does not occur a second time; before it all tokens but the ends are allowed.
    """

    def __init__(
        self, grammar: Grammar, eos_ids: Sequence[int], vocab_size: int, end_ids: Sequence[int], after: int | None
    ) -> None:
        """eos_ids: what the grammar's masks show where it may end."""
        self._grammar, self._after, self._vocab_size = grammar, after, vocab_size
        self._eos_ids, self._end_ids = ([i for i in ids if i < vocab_size] for ids in (eos_ids, end_ids))
        self._matcher: Any = None  # None: the grammar does not apply yet, or no token was wanted yet
        self._taken = 0  # output tokens that were looked at
        self._allowed: np.ndarray | None = None

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray:
        """The tokens that may follow these output tokens, bool [V]. The ids only ever grow."""
        if self._allowed is None:
            if self._after is None:
                self._matcher = self._grammar.matcher()
            self._allowed = self._mask()
        for token in output_ids[self._taken :]:
            if self._matcher is not None:
                self._matcher.consume_token(token)
            elif token == self._after:
                self._matcher = self._grammar.matcher()
            self._allowed = self._mask()
        self._taken = len(output_ids)
        return self._allowed

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, on one line; empty while it can."""
        said = "" if self._matcher is None else self._grammar.error or self._matcher.get_error()
        return " ".join(said.split())

    def _mask(self) -> np.ndarray:
        mask = np.ones(self._vocab_size, dtype=np.bool_)
        if self._matcher is None:
            mask[self._end_ids] = False
            return mask
        is_whole = self._matcher.is_accepting()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # the mask of a matcher in error has the end tokens
            return np.zeros_like(mask)
        given = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[:] = False
        mask[: len(given)] = given
        mask[self._eos_ids] = False
        if self._after is not None:
            mask[self._after] = False
        mask[self._end_ids] = is_whole
        return mask


_lock = threading.Lock()
_tables: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # tokenizer -> its table
_grammars: WeakValueDictionary[tuple[int, str], Grammar] = WeakValueDictionary()  # (id of a table, text) -> grammar


def token_table(tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The bytes of a tokenizer's tokens, as llguidance has them; made once, in about a second for 150,000 tokens.

    Raises: ValueError for a tokenizer that llguidance cannot read.
    """
    from llguidance import LLTokenizer

    if (table := _tables.get(tokenizer)) is None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json")
        size = max(vocab_size, max(tokenizer.get_vocab().values()) + 1)
        table = _tables[tokenizer] = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=[*eos_ids] or None)
    return table


def compiled(tokenizer: Any, text: str, vocab_size: int, eos_ids: Sequence[int]) -> Grammar:
    """The grammar for a model's tokens; the same object while one is alive. Raises ValueError as `token_table`."""
    with _lock:
        table = token_table(tokenizer, vocab_size, eos_ids)
        known = _grammars.get((id(table), text))
    if known is None:
        made = Grammar(table, text)  # outside the lock, for it may take seconds
        with _lock:
            known = _grammars.setdefault((id(table), text), made)
    return known


_worker_lock = threading.Lock()
_workers: list[Any] = []  # the process that builds grammars first, while it lives


def _error_of(text: str) -> str:
    """Problems of a grammar, found in a process with limits; empty if there are none."""
    import llguidance

    from evalengine.util.line_worker import LineWorker

    with _worker_lock:
        if not _workers:
            # With -I Python imports nothing of the user's environment or folder; libraries may be in separate folders.
            places = sorted({str(Path(module.__file__ or "").parents[1]) for module in (llguidance, np)})
            code = f"import runpy, sys; sys.path += {places!r}; runpy.run_path({__file__!r}, run_name='__main__')"
            _workers.append(LineWorker(["-I", "-c", code], {**os.environ, "OPENBLAS_NUM_THREADS": "1"}))
        if (answer := _workers[0].ask({"grammar": text})) is not None:
            return str(answer["error"])
        _workers.clear()
    return f"it takes more than {SECONDS} s or {BYTES >> 20} MiB to compile"


def _limits() -> Any:
    from llguidance import LLParserLimits

    # Without `precompute_large_lexemes` the time to build a grammar does not grow with the vocabulary.
    return LLParserLimits(precompute_large_lexemes=False, verbose_errors=False)


def main() -> None:
    """Checks grammars until standard input ends."""
    from llguidance import LLMatcher

    for number in (signal.SIGINT, signal.SIGTERM):  # they are the parent's to handle: this process ends with it
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        fails, said = LLMatcher.validate_grammar_with_warnings(json.loads(line)["grammar"], limits=_limits())
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply = {"error": said[0] if fails else ""}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
