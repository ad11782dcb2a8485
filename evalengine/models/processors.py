"""The settings of transformers' logits processors, which change logits before a token is chosen, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, PlainValidator

from evalengine.config.schema import Least0, Real
from evalengine.errors import ConfigError
from evalengine.util.validation import LARGEST, must, read_fields, token_ids

LARGEST_BIAS, LARGEST_PENALTY = 100, 2  # OpenAI's bounds, of either sign


def read_ids(value: Any) -> list[int]:
    """The token ids of any sequence or array of integers. Raises ValueError."""
    if (ids := token_ids(value)) is None:
        raise ValueError("must be token ids, a sequence of integers")
    return ids


def _lists(value: Any) -> tuple[tuple[int, ...], ...]:
    lists = [token_ids(ids) for ids in value] if isinstance(value, Sequence) and not isinstance(value, str) else [None]
    if not all(lists):
        raise ValueError("must be a list of lists of token ids")
    return tuple(tuple(ids or ()) for ids in lists)


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple, and any other value unchanged: JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _each_once(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("must name each token id once")
    return tuple(sorted(pairs))


Natural = Annotated[Least0, Le(LARGEST)]
TokenIdTuple = Annotated[tuple[int, ...], PlainValidator(lambda ids: tuple(read_ids(ids)))]
TokenIdTuples = Annotated[tuple[tuple[int, ...], ...], PlainValidator(_lists)]
# The bounds are those of positive normal numbers in float32.
Factor = Annotated[Real, Ge(2.0**-126), Le(3.4e38), must("be a positive number (1: off)")]
Penalty = Annotated[
    Real, Ge(-LARGEST_PENALTY), Le(LARGEST_PENALTY), must(f"be a number from -{LARGEST_PENALTY} to {LARGEST_PENALTY}")
]
Bias = Annotated[Real, Ge(-LARGEST_BIAS), Le(LARGEST_BIAS)]
Biases = Annotated[
    tuple[Annotated[tuple[Natural, Bias], BeforeValidator(as_tuple)], ...], BeforeValidator(as_tuple),
    AfterValidator(_each_once),
    must(f"be pairs of a token id and a number from -{LARGEST_BIAS} to {LARGEST_BIAS}, each id once"),
]  # fmt: skip
Unicode = Annotated[str, MinLen(0)]


@dataclass(frozen=True)
class LogitsProcessors:
    """Processors that apply to every generated token, greedy or sampled, and never to a score.

    The order is transformers' (`_get_logits_processor`): the repetition penalty changes logits, all the others forbid
    tokens, and in which order tokens are forbidden cannot matter. Prompt tokens count as seen. Temperature, top-k and
    top-p come after them. Logprobs, their alternatives and `is_greedy` stay those of the raw model.

    Their effect depends on the request's own tokens alone: on no other request, page, chunk or preemption.

    Raises: ConfigError for values that cannot be meant, all at once.
    """

    repetition_penalty: Factor = 1.0  # p (1: off); a seen token's logit is multiplied by p if negative, else divided
    no_repeat_ngram_size: Natural = 0  # n (0: off); no n tokens in a row occur twice
    bad_words_ids: TokenIdTuples = ()  # sequences never completed; a lone EOS id is ignored
    min_length: Natural = 0  # no EOS before prompt and new tokens together are that many
    min_new_tokens: Natural = 0  # no EOS among the first so many new tokens; where positive, `min_length` does not hold
    suppress_tokens: TokenIdTuple = ()  # token ids that are never chosen
    begin_suppress_tokens: TokenIdTuple = ()  # token ids that are not chosen as the first new token

    def __post_init__(self) -> None:
        read_fields(self)

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

    logit_bias: Biases = ()  # (token id, bias), by token id
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    grammar: Unicode = ""  # Lark, in llguidance's dialect; "": none
    grammar_library: Unicode = ""  # what computes its masks, e.g. "llguidance 1.9.1": another version may allow others
    grammar_after: Natural | None = None  # the grammar applies after the answer's first such token; None: to all of it

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.grammar) != bool(self.grammar_library):
            raise ConfigError("grammar, grammar_library: give both, or neither")

    def largest_token_id(self) -> int:
        """As for `LogitsProcessors`; the others have no negative ids."""
        after = -1 if self.grammar_after is None else self.grammar_after
        return max(super().largest_token_id(), after, *(token for token, _ in self.logit_bias))


def of_plain(values: Mapping[str, Any]) -> LogitsProcessors:
    """The processors whose `asdict` has these values. Raises ConfigError, and TypeError for an unknown name."""
    kind = LogitsProcessors if values.keys() <= {f.name for f in fields(LogitsProcessors)} else RequestProcessors
    return kind(**values)
