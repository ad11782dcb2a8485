"""The model that is served: its name, its fingerprint, its tokenizer and template, and what bounds a request."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from evalengine.config.schema import TEMPLATE_DATE, Config, template_variables
from evalengine.engine.llm import LLM
from evalengine.engine.text.chat_template import ChatTemplate, Wording
from evalengine.engine.text.encode import encode, encode_as
from evalengine.engine.text.tokenizer import class_name
from evalengine.errors import ConfigError
from evalengine.harness.identity import engine_identity
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.grammars import Grammars
from evalengine.integrations.openai_server.tool_calls import ToolFormat, find_format, with_objects
from evalengine.records.sealed import content_sha256

logger = logging.getLogger(__name__)
OF_A_CHAT = Wording(
    where="messages",
    without_template="/v1/completions takes a text without a template",
    without_system="leave the system message out",
    as_one_message="put all of it into one user message",
)
# Characters of a prompt for each token that the model takes: of a longer prompt the beginning is encoded first.
CHARACTERS_FIRST = 8
MOST_TOKENIZED = 1 << 22  # characters that /tokenize takes: the tokenizer needs some 200 bytes for each
MOST_DETOKENIZED = 1 << 17  # tokens that /detokenize takes, or what the context holds; 40 ms in which no thread runs
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # a template's that are not a client's


class ServedModel:
    """A served model: the engine, and the server's other state.

    The tokenizer is a copy: the engine's own is used by the engine's thread.
    """

    def __init__(self, config: Config, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise ConfigError("model.tokenizer: a server needs the model's tokenizer, and load_format=dummy has none")
        self.name = config.model.name
        self.tokenizer: Any = copy.deepcopy(llm.tokenizer)
        self.limits, self.spec = llm.limits, llm.spec
        self.most_detokenized = max(MOST_DETOKENIZED, llm.limits.max_model_len)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))  # characters; of bytes written as such, no less
        self.think_end = config.model.think_end_token
        self.grammars = Grammars(llm.tokenizer, llm.limits.vocab_size, tuple(llm.spec.eos_token_ids))
        self.identity = served_identity(config, llm)
        self.fingerprint = f"fp_{content_sha256(self.identity)[:32]}"
        self._lock = threading.Lock()  # the template's process answers one question after another
        self._template: ChatTemplate | None = None
        self.tool_format: ToolFormat | None = None  # how its answers call tools
        if self.tokenizer.chat_template:
            date = config.chat_template_date or TEMPLATE_DATE
            self._template = ChatTemplate(self.tokenizer, date, OF_A_CHAT, template_variables(config))
            self.tool_format = find_format(self.tokenizer.get_chat_template())

    def check_name(self, named: str | None) -> None:
        """Raises ApiError for the name of another model."""
        if named is not None and named != self.name:
            raise ApiError(404, f"there is no model {named[:100]!r} here, this server has {self.name!r}", "model",
                           "model_not_found")  # fmt: skip

    def encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. It may take seconds, and is to be called outside the event loop. Raises ApiError for
        a text that the tokenizer cannot encode."""
        try:
            return encode(self.tokenizer, text) if add_special_tokens else encode_as(self.tokenizer, text, False)
        except ConfigError as error:
            logger.warning("%s", error)
            raise ApiError(400, "the tokenizer has no token for a part of the text", "prompt") from error

    def prompt_ids(self, text: str, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """`encoded` for a prompt, which comes from this field of the request.

        Raises: ApiError for a text that is too long for the model, without encoding all of it: 31 MB take minutes and
        gigabytes.
        """
        most = self.limits.max_model_len
        if len(text) > most * self._longest_token:
            raise self._too_long(f"{len(text)} characters, more than {most} tokens stand for", field)
        size = CHARACTERS_FIRST * most
        while size < len(text):
            # Where the text is cut the last tokens may differ from those of the whole, but never half of them.
            if len(self.encoded(text[:size], add_special_tokens)) > 2 * most:
                raise self._too_long(f"more than {2 * most} tokens", field)
            size *= 4
        return self.encoded(text, add_special_tokens)

    def check_length(self, num_tokens: int, room: int = 0, field: str = "prompt") -> None:
        """Raises ApiError for a prompt that leaves room for fewer tokens than `room`."""
        if num_tokens + room > self.limits.max_model_len:
            raise self._too_long(f"{num_tokens} tokens", field)

    def _too_long(self, size: str, field: str) -> ApiError:
        return ApiError(400, f"the prompt has {size}; it and its answer may have {self.limits.max_model_len} tokens "
                        "together: shorten it", field, "context_length_exceeded")  # fmt: skip

    def thinking_end(self, prompt: str, param: str) -> int | None:
        """The token that ends the thinking of an answer; None for a model without, and where the prompt has ended it.

        Raises: ApiError if the end is several tokens: a grammar begins after one token. param: the request's field.
        """
        end = self.think_end
        if end is None:
            return None
        text = end if isinstance(end, str) else self.decoded([end])
        if prompt.rstrip().endswith(text.strip()):
            return None
        ids = [end] if isinstance(end, int) else encode_as(self.tokenizer, end, False)
        if len(ids) != 1:
            raise ApiError(400, f"{param}: not supported with this server's model.think_end_token={end!r}, which is "
                           f"{len(ids)} tokens", param)  # fmt: skip
        return ids[0]

    def decoded(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Raises ApiError for ids that are none."""
        if ids and not 0 <= min(ids) <= max(ids) < self.spec.vocab_size:
            raise ApiError(400, f"token ids must be in 0 ... {self.spec.vocab_size - 1}", "tokens")
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def templated(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the model's template makes of messages. It may take seconds, and is to be called outside the
        event loop. Raises ApiError and ConfigError."""
        if self._template is None:
            raise ApiError(400, f"{self.name} has no chat template: /v1/completions takes a text", "messages")
        with self._lock:
            reads = self._template.reads()
            given = {**(variables or {}), **({"tools": tools} if tools else {})}
            if own := sorted({*(variables or {})} & {*OWN_VARIABLES, *self.tokenizer.special_tokens_map}):
                why = f"chat_template_kwargs: {own[0][:60]} is not for a client to set"
                raise ApiError(400, why, "chat_template_kwargs")
            if unread := sorted(given.keys() - reads):
                field = "chat_template_kwargs" if unread[0] in (variables or {}) else "tools"
                raise ApiError(400, f"{unread[0][:60]}: the model's chat template does not read it", field)
            return self._template([readable(message) for message in messages], add_generation_prompt, given)

    def tokenizer_info(self) -> dict[str, Any]:
        """The settings that a client needs to make the same prompts, in the format of vLLM's server."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()
                   if isinstance(token, str)}  # fmt: skip
        return {
            "tokenizer_class": class_name(self.tokenizer),
            "chat_template": self.tokenizer.chat_template,
            "model_max_length": self.limits.max_model_len,
            "vocab_size": self.spec.vocab_size,
            **special,
        }


def served_identity(config: Config, llm: LLM) -> dict[str, Any]:
    """Everything that an answer depends on, except its request, by content: weights, spec, tokenizer, template, level,
    contract. Hashes the weight files."""
    thinking = config.model.think_end_token
    return {
        **engine_identity(replace(config, apply_chat_template=True), llm),
        "chat_template_date": config.chat_template_date or TEMPLATE_DATE,
        "chat_template_args": template_variables(config),
        "max_model_len": llm.limits.max_model_len,
        **({} if thinking is None else {"think_end_token": thinking}),
        "processors": asdict(llm.spec.processors),
    }


def readable(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text: a list of text parts becomes their lines. Raises ApiError for others."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, "messages: every message needs a role", "messages")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "\n".join(map(_part, content))
    if not isinstance(content, str):
        raise ApiError(400, f"messages: the content of a {role[:20]} message must be a text, or a list of text parts",
                       "messages")  # fmt: skip
    return with_objects({**message, "content": content})


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(400, f"messages: a part of type {str(kind)[:40]!r} is not built, texts are", "messages")
