"""Guesses of the tokens that running sequences will choose, and whether computing them together has paid so far.

A token is a pure function of the logits before it, the seed and its position, so a guess is checked by comparing,
greedy or sampled, and a step of one known token and k guesses of a sequence gives 1 to k + 1 tokens: those that it
would have chosen one by one, with the same logprobs. Whatever is guessed, no bit of a batch-invariant level changes.

There is no second model. Guesses are what answers to the same prompt said at the same place (`SIBLING`: other samples,
equal requests, an earlier run's answer), or what followed the last tokens where they stood before, in the sequence or
in those answers (`REPEAT`).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from evalengine.engine.schedule.sequence import Generating, Sequence

SIBLING, REPEAT = "sibling", "repeat"
MOST_SEQUENCES = 32  # sequences in a step above which its products are bound by arithmetic, not by the weights' bytes
MOST_ROWS = 256  # tokens of a step with guesses
LONGEST = {SIBLING: 15, REPEAT: 7}  # guesses of a sequence in a step, and no more than about twice what they give
RUN = 3  # tokens that must have stood before for what followed them to be a guess
AGREED = 8  # of an answer's tokens before a place that must be the sequence's own, if it has so many
WORTHWHILE = 0.5  # tokens that the guesses of a step must give for each sequence, on average of what they gave before
PATIENCE = (16, 256)  # steps without guesses before the next trial: at first, and after many that did not pay
MEMORY = 1024  # prompts whose answers are stored
ANSWERS = 16  # of a prompt: the newest are looked at
LEARNING = 0.2  # weight of the newest step in what a kind of guesses gives


class TokenIndex:
    """A list of tokens that grows, and where each run of RUN tokens stood in it last."""

    def __init__(self, tokens: list[int], start: int) -> None:
        """start: the place of the first answered token; before it is the prompt."""
        self.tokens, self.start = tokens, start
        self._after: dict[tuple[int, ...], int] = {}  # a run -> the place behind it
        self._indexed = RUN

    def following(self, run: tuple[int, ...]) -> list[int]:
        """The tokens after the run's last place that has any; none if it does not stand there."""
        for end in range(self._indexed, len(self.tokens)):
            self._after[tuple(self.tokens[end - RUN : end])] = end
        self._indexed = max(self._indexed, len(self.tokens))
        place = self._after.get(run)
        return [] if place is None else self.tokens[place : place + LONGEST[REPEAT]]

    def at(self, seq: Generating, most: int) -> list[int]:
        """Return the answer's next tokens at the sequence's length, if the `most` tokens before them (or all, if there
        are fewer) equal the sequence's."""
        length = len(seq.token_ids) - seq.num_prompt_tokens
        place, agreed = self.start + length, min(length, most)
        if self.tokens[place - agreed : place] != seq.token_ids[len(seq.token_ids) - agreed :]:
            return []
        return self.tokens[place : place + LONGEST[SIBLING]]


@dataclass
class Gain:
    """The yield of one kind of draft, in tokens per sequence and step."""

    tokens: float

    def learn(self, accepted: int) -> None:
        self.tokens += LEARNING * (accepted - self.tokens)


@dataclass
class Drafter:
    """Makes the guesses of each step; owned by the scheduler.

    always: guesses in every step, if need be that the last token comes once more, which is mostly wrong; else guesses
    where they have paid, and occasionally to see whether they would. known_only: guesses are an earlier run's answers.
    """

    always: bool = False
    known_only: bool = False
    gains: dict[str, Gain] = field(default_factory=lambda: {SIBLING: Gain(2.0), REPEAT: Gain(1.0)})
    _learned: dict[bytes, list[TokenIndex]] = field(default_factory=dict)  # by `_key` of the prompt: an earlier run's
    _answers: OrderedDict[bytes, list[TokenIndex]] = field(default_factory=OrderedDict)  # this run's
    _own: dict[int, tuple[bytes, TokenIndex]] = field(default_factory=dict)  # of sequences that run
    _kinds: dict[int, str] = field(default_factory=dict)  # seq_id -> the kind of the guesses in flight
    _wait: int = 0  # steps until the next trial
    _patience: int = PATIENCE[0]

    def learn_answer(self, prompt_ids: SequenceOf[int], token_ids: SequenceOf[int]) -> None:
        """Notes what an earlier run answered to a prompt."""
        self._learned.setdefault(_key(prompt_ids), []).append(TokenIndex(list(token_ids), 0))

    def is_due(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the next step is to be looked at for guesses, so that the tokens before it must be known."""
        if not 0 < len(running) <= MOST_SEQUENCES:
            return False
        return self.always or self._wait <= 0

    def propose(self, running: SequenceOf[Sequence]) -> dict[int, list[int]]:
        """Guesses by seq_id for a step in which every one of these sequences computes its last known token; none if
        that would not pay."""
        if not self.is_due(running):
            self.wait()
            return {}
        most = MOST_ROWS // len(running) - 1
        found = {seq.seq_id: self._guess(seq, most) for seq in running if isinstance(seq, Generating)}
        guesses = {seq_id: tokens for seq_id, (_, tokens) in found.items() if tokens}
        expected = sum(self.gains[kind].tokens for kind, tokens in found.values() if tokens)
        if expected < WORTHWHILE * len(running):  # this step is a trial
            self._wait, self._patience = self._patience, min(2 * self._patience, PATIENCE[1])
        else:
            self._patience = PATIENCE[0]
        self._kinds = {seq_id: found[seq_id][0] for seq_id in guesses}
        return guesses

    def wait(self) -> None:
        """Notes a step that was not looked at."""
        self._wait -= 1

    def take(self, seq: Sequence, accepted: int) -> None:
        """Notes how many of a sequence's guesses in the last step were right."""
        self.gains[self._kinds[seq.seq_id]].learn(accepted)

    def forget(self, seq: Sequence) -> None:
        """Drops what only a running sequence needs; what it said stays for its siblings."""
        self._own.pop(seq.seq_id, None)

    def end_run(self) -> None:
        """Drops what this run's sequences said: its requests have been answered."""
        self._own.clear()
        self._answers.clear()

    def _guess(self, seq: Generating, most: int) -> tuple[str, list[int]]:
        """The kind of the sequence's guesses, and up to `most` of them."""
        most = min(most, seq.max_output_tokens - len(seq.logprobs) - 1)
        if most < 1 or seq.processing is not None or seq.num_computed_tokens < seq.num_prompt_tokens:
            return REPEAT, []
        if seq.seq_id not in self._own:
            prompt = _key(seq.request.prompt_ids)
            self._own[seq.seq_id] = prompt, TokenIndex(seq.token_ids, seq.num_prompt_tokens)
            self._keep(*self._own[seq.seq_id])
        prompt, own = self._own[seq.seq_id]
        siblings = [answer for answer in reversed(self._answers.get(prompt, [])) if answer is not own]
        answers = [*self._learned.get(prompt, []), *(() if self.known_only else siblings)]
        for agreeing in (len(seq.token_ids), AGREED):
            for answer in answers:
                if guess := answer.at(seq, agreeing):
                    return SIBLING, guess[: min(most, self._length(SIBLING))]
        if self.known_only:
            return REPEAT, []
        run = tuple(seq.token_ids[-RUN:])
        for answer in (own, *answers):
            if guess := answer.following(run):
                return REPEAT, guess[: min(most, self._length(REPEAT))]
        return REPEAT, [seq.token_ids[-1]] if self.always else []

    def _length(self, kind: str) -> int:
        """How many guesses are made at once: a wrong one costs a row of every product."""
        return min(LONGEST[kind], 1 + math.ceil(2 * self.gains[kind].tokens))

    def _keep(self, prompt: bytes, answer: TokenIndex) -> None:
        self._answers.setdefault(prompt, []).append(answer)
        self._answers.move_to_end(prompt)
        del self._answers[prompt][:-ANSWERS]
        if len(self._answers) > MEMORY:
            self._answers.popitem(last=False)


def _key(prompt_ids: SequenceOf[int]) -> bytes:
    return hashlib.sha256(array("q", prompt_ids).tobytes()).digest()
