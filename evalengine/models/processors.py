"""The settings of transformers' logits processors, which change logits before a token is chosen, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from evalengine.config.arguments import Fields, integer, is_unicode, number, token_ids

_FLOAT32 = (2.0**-126, 3.4e38)  # the range of positive normal numbers
LARGEST_BIAS, LARGEST_PENALTY = 100, 2  # OpenAI's bounds, of either sign


@dataclass(frozen=True)
class LogitsProcessors:
    """Processors that apply to every generated token, greedy or sampled, and never to a score.

    The order is transformers' (`_get_logits_processor`): the repetition penalty changes logits, all the others forbid
    tokens, and in which order tokens are forbidden cannot matter. Prompt tokens count as seen. Temperature, top-k and
    top-p come after them. Logprobs, their alternatives and `is_greedy` stay those of the raw model.

    Their effect depends on the request's own tokens alone: on no other request, page, chunk or preemption.

    Raises: ConfigError for values that cannot be meant, all at once.
    """

    repetition_penalty: float = 1.0  # p (1: off); a seen token's logit is multiplied by p if negative, else divided
    no_repeat_ngram_size: int = 0  # n (0: off); no n tokens in a row occur twice
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # sequences never completed; a lone EOS id is ignored
    min_length: int = 0  # no EOS before prompt and new tokens together are that many
    min_new_tokens: int = 0  # no EOS among the first so many new tokens; where positive, `min_length` does not hold
    suppress_tokens: tuple[int, ...] = ()  # token ids that are never chosen
    begin_suppress_tokens: tuple[int, ...] = ()  # token ids that are not chosen as the first new token

    def __post_init__(self) -> None:
        read = Fields(self)
        read.number("repetition_penalty", *_FLOAT32, "a positive number (1: off)")
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
            read.integer(name, 0)
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            ids = token_ids(getattr(self, name))
            read.take(name, None if ids is None else tuple(ids), ids is not None, "a list of token ids")
        words = self.bad_words_ids
        lists = [token_ids(w) for w in words] if isinstance(words, Sequence) and not isinstance(words, str) else [None]
        read.take("bad_words_ids", tuple(tuple(w or ()) for w in lists), all(lists), "a list of lists of token ids")
        read.check()

    def in_force(self) -> dict[str, Any]:
        """The settings that have an effect, by name."""
        neutral = {f.name: f.default for f in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != neutral[name]}

    def largest_token_id(self) -> int:
        """The largest token id in the settings; -1 if there is none. Negative ids count as beyond every vocabulary."""
        ids = [*self.suppress_tokens, *self.begin_suppress_tokens, *(i for word in self.bad_words_ids for i in word)]
        return max((i if i >= 0 else 1 << 62 for i in ids), default=-1)


@dataclass(frozen=True)
class RequestProcessors(LogitsProcessors):
    """Processors that only a request sets, never a checkpoint.

    OpenAI's formula, after the repetition penalty: a token that the answer contains c times has

        logit + bias - (c * frequency_penalty + (1 if c > 0 else 0) * presence_penalty)

    Prompt tokens do not count. With `grammar` only tokens that continue the answer in it are chosen, and a token that
    ends the answer only where the answer is whole (`engine.text.grammar`).

    These are separate from `LogitsProcessors` so that a model's spec, and a request without them, has the same hash as
    before.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), by token id
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    grammar: str = ""  # Lark, in llguidance's dialect; "": none
    grammar_library: str = ""  # what computes its masks, e.g. "llguidance 1.9.1": another version may allow others
    grammar_after: int | None = None  # the grammar applies after the answer's first such token; None: to all of it

    def __post_init__(self) -> None:
        super().__post_init__()
        read = Fields(self)
        bias = self.logit_bias
        pairs = [_bias(pair) for pair in bias] if isinstance(bias, Sequence) and not isinstance(bias, str) else [None]
        found = dict(pair for pair in pairs if pair is not None)
        expected = f"pairs of a token id and a number from -{LARGEST_BIAS} to {LARGEST_BIAS}, each id once"
        read.take("logit_bias", tuple(sorted(found.items())), len(found) == len(pairs), expected)
        for name in ("presence_penalty", "frequency_penalty"):
            most = LARGEST_PENALTY
            read.number(name, -most, most, f"a number from -{most} to {most}")
        for name in ("grammar", "grammar_library"):
            value = getattr(self, name)
            read.take(name, value, isinstance(value, str) and is_unicode(value), "text (Unicode)")
        if self.grammar_after is not None:
            read.integer("grammar_after", 0, meaning=" (a token id), or None")
        if bool(self.grammar) != bool(self.grammar_library):
            read.problems.append("grammar, grammar_library: give both, or neither")
        read.check()

    def largest_token_id(self) -> int:
        """As for `LogitsProcessors`; the others have no negative ids."""
        after = -1 if self.grammar_after is None else self.grammar_after
        return max(super().largest_token_id(), after, *(token for token, _ in self.logit_bias))


def of_plain(values: Mapping[str, Any]) -> LogitsProcessors:
    """The processors whose `asdict` has these values. Raises ConfigError, and TypeError for an unknown name."""
    kind = LogitsProcessors if values.keys() <= {f.name for f in fields(LogitsProcessors)} else RequestProcessors
    return kind(**values)


def _bias(pair: Any) -> tuple[int, float] | None:
    """A token id and its bias; None for anything else."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        return None
    token, bias = integer(pair[0]), number(pair[1])
    if token is None or token < 0 or bias is None or not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
        return None
    return token, bias
