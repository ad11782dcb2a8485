"""`EvalEngineAPI`: answers inspect_ai's requests by an engine in this process, which batches them as they come."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from evalengine.config.compose import compose_jobs
from evalengine.config.overrides import word
from evalengine.config.schema import Config, EngineConfig
from evalengine.config.shipped import available
from evalengine.engine.llm import LLM
from evalengine.engine.thread import EngineThread
from evalengine.errors import ConfigError
from evalengine.integrations.openai_server.answering import Submission
from evalengine.integrations.openai_server.answers import Writer, usage
from evalengine.integrations.openai_server.bodies import ChatBody, read_body
from evalengine.integrations.openai_server.errors import ApiError
from evalengine.integrations.openai_server.model import ServedModel
from evalengine.integrations.openai_server.recorder import Recorder, ServedRun
from evalengine.integrations.openai_server.request_bodies import ServerRequest, chat_request
from evalengine.integrations.openai_server.settings import ServeSettings

OF_THE_MODEL = (
    *("revision", "tokenizer", "load_format", "implementation", "adapter", "adapter_revision", "generation_config"),
    "think_end_token",
)
OF_A_RUN = ("batch_invariant", "numerics", "enable_thinking", "chat_template_args", "chat_template_date")
OF_THE_ENGINE = tuple(item.name for item in fields(EngineConfig))
RECORD = "record"  # a folder for the run that records the answers

LIMITS = ServeSettings()
STOP_REASONS: dict[str, Any] = {"stop": "stop", "length": "max_tokens"}
BUILT = ("temperature", "top_p", "top_k", "max_tokens", "num_choices", "seed", "stop_seqs", "logprobs", "top_logprobs")
# Options that inspect_ai implements, and how requests are sent: no answer depends on these. All others would change
# one.
IGNORED = ("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections",
           "adaptive_connections", "system_message", "parallel_tool_calls", "internal_tools", "max_tool_output",
           "cache_prompt", "cache", "batch", "fallback_models", "fail_on_refusal", "reasoning_summary",
           "reasoning_history", "extra_headers")  # fmt: skip


class EvalEngineAPI(ModelAPI):
    """A model of inspect_ai.

    Args: `-M` takes the engine's settings by their bare names (max_num_seqs=64), `batch_invariant`, `enable_thinking`,
    `think_end_token`, ..., and `record=FOLDER`, which keeps every answer as a run that `check` computes again.

    Raises: ConfigError for settings that cannot be honoured.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        settings, record = read_settings(model_name, model_args)
        self._llm = LLM(settings.model, batch_invariant=settings.batch_invariant, numerics=settings.numerics,
                        engine=settings.engine)  # fmt: skip
        self._served = ServedModel(settings, self._llm)
        self._writer = Writer(self._served)
        name = f"inspect-{settings.model.name}"
        self._run = None if record is None else ServedRun.open(record, name, settings, self._llm)
        self._recorder = None if self._run is None else Recorder(self._run)
        self._engine = EngineThread(self._llm)
        self._engine.start()
        atexit.register(self.close)  # `inspect eval` closes no model, and a recorded run must be finished

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """The model's answers. Raises ValueError for unsupported options, and for an answer that cannot be recorded."""
        try:
            ask = await asyncio.to_thread(self._ask, input, tools, tool_choice, config)
            if ask is None:
                return ModelOutput.from_content(self.model_name, "", "model_length")
            if self._recorder is not None:
                self._recorder.check()
            submission = Submission(ask, self._engine)
            try:
                await submission.whole()
            finally:
                submission.close()
            receipt = {} if self._recorder is None else self._recorder.headers(ask)
            if self._recorder is not None:
                self._recorder.add(submission)
        except ApiError as error:
            raise ValueError(error.message) from error
        return self._output(submission, receipt)

    def _ask(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ServerRequest | None:
        """The engine's request; None if the prompt fills the model's context."""
        if refused := [name for name, value in config if value is not None and name not in (*BUILT, *IGNORED)]:
            raise ApiError(400, f"{refused[0]}: not built; leave it out")
        if tool_choice not in ("auto", "none"):
            raise ApiError(400, f"tool_choice={tool_choice!r}: not built; auto and none are")
        described = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools]
        prompt = self._served.templated(
            [_plain(message) for message in messages], described if tool_choice == "auto" else None, None
        )
        if len(self._served.encoded(prompt)) >= self._served.limits.max_model_len:
            return None
        wanted = {
            "messages": [{"role": "user", "content": ""}],  # the template has put them into words
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "max_tokens": config.max_tokens,
            "n": config.num_choices,
            "seed": config.seed,
            "stop": config.stop_seqs or None,
            "logprobs": config.logprobs,
            "top_logprobs": config.top_logprobs if config.logprobs else None,
        }
        ask = chat_request(read_body(ChatBody, wanted), prompt, self._served, LIMITS)
        return replace(ask, first_sample=_epoch() * ask.n)

    def _output(self, submission: Submission, receipt: dict[str, str]) -> ModelOutput:
        ask, counts = submission.ask, usage(submission.ask, submission.outputs)
        choices = []
        for choice in ask.choices:
            output = submission.outputs[choice.index]
            said = self._writer.message(output)
            content: str | list[Content] = said["content"]
            if said.get("reasoning_content"):
                content = [ContentReasoning(reasoning=said["reasoning_content"]), ContentText(text=said["content"])]
            message = ChatMessageAssistant(content=content, model=self.model_name, source="generate")
            logprobs = self._writer.logprobs_of(ask, output)
            reason, given = STOP_REASONS[output.finish_reason], None if logprobs is None else _logprobs(logprobs)
            choices.append(ChatCompletionChoice(message=message, stop_reason=reason, logprobs=given))
        spent = ModelUsage(input_tokens=counts["prompt_tokens"], output_tokens=counts["completion_tokens"],
                           total_tokens=counts["total_tokens"])  # fmt: skip
        about = {"system_fingerprint": self._served.fingerprint, "seed": ask.seed, **receipt}
        return ModelOutput(model=self.model_name, choices=choices, usage=spent, metadata={"evalengine": about})

    def max_connections(self) -> int:
        """How many requests inspect_ai sends at once: as many as fit the engine's batch."""
        return self._llm.config.max_num_seqs

    def close(self) -> None:
        """Ends the engine, and finishes the run that records its answers. Idempotent."""
        atexit.unregister(self.close)
        self._engine.stop(halt=True)
        run, self._run = self._run, None
        if run is not None:
            run.finish()
        self._llm.close()


def _epoch() -> int:
    """Which repetition of its sample makes the request, from 0: each has its own noise. 0 outside an evaluation."""
    try:
        from inspect_ai.log._samples import sample_active
    except ImportError:  # no public name says it
        return 0
    sample = sample_active()
    return 0 if sample is None else int(sample.epoch) - 1


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as templates take it."""
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if not isinstance(message.content, str) and any(part.type not in ("text", "reasoning") for part in message.content):
        raise ApiError(400, "a message with something else than text is not built")
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        calls = [{"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
                 for call in message.tool_calls]  # fmt: skip
        plain["tool_calls"] = calls
    if isinstance(message, ChatMessageTool) and message.function:
        plain["name"] = message.function
    return plain


def _logprobs(said: dict[str, Any]) -> Logprobs:
    return Logprobs(content=[
        Logprob(token=one["token"], logprob=one["logprob"], bytes=one["bytes"],
                top_logprobs=[TopLogprob(**top) for top in one["top_logprobs"]])
        for one in said["content"]
    ])  # fmt: skip


def read_settings(model: str, given: Mapping[str, Any]) -> tuple[Config, str | None]:
    """(the configuration, the folder to record in). model: a name of `conf/model/`, a folder, a Hub id or a .gguf file.

    Raises: ConfigError with all that is wrong.
    """
    words = [f"model={model}" if model in available("model") else word("model.path", model)]
    record, problems = None, []
    for name, value in given.items():
        if name == RECORD:
            record = str(value)
        elif name in OF_THE_ENGINE:
            words.append(word(f"engine.{name}", value))
        elif name in OF_THE_MODEL:
            words.append(word(f"model.{name}", value))
        elif name in OF_A_RUN:
            words.append(word(name, value))
        else:
            known = ", ".join((RECORD, *OF_A_RUN, *OF_THE_MODEL, *OF_THE_ENGINE))
            problems.append(f"-M {name}: no argument of this model; there are {known}")
    if problems:
        raise ConfigError(problems)
    return compose_jobs(words)[0].config, record
