"""A model of lm-eval without its answers: construction, what it tells lm-eval about itself, text and tokens."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import torch
from lm_eval.api.model import TemplateLM

from evalengine.config.schema import TEMPLATE_DATE, Config
from evalengine.engine.deferred import DeferredLLM
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint
from evalengine.engine.settings import settings_problems
from evalengine.engine.text.chat_template import ChatTemplate, Wording
from evalengine.engine.text.encode import prefix_token_id
from evalengine.engine.text.pieces import PieceTokenizer
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.errors import ConfigError
from evalengine.lm_eval_model import LOGGER
from evalengine.lm_eval_model.arguments import ModelArguments, ignored_batch_size, read_arguments, with_device
from evalengine.lm_eval_model.place import find_place
from evalengine.lm_eval_model.recorder import EvaluationRecorder
from evalengine.lm_eval_model.tokens import encode_scored, set_add_bos_token
from evalengine.models.decoder import num_parameters

logger = logging.getLogger(LOGGER)
OF_LM_EVAL = Wording(
    where="--apply_chat_template",
    without_template="leave --apply_chat_template out",
    without_system="leave --system_instruction out",
    as_one_message="--fewshot_as_multiturn=false sends one user message",
)


class EngineBackedModel(TemplateLM):
    """A model of lm-eval without the methods that answer requests.

    Raises:
        ConfigError: unknown arguments, a model that is not found and settings that cannot be honoured, all at once.
    """

    def __init__(self, batch_size: Any = None, max_batch_size: Any = None, device: Any = None, **given: Any) -> None:
        super().__init__()
        begin = time.perf_counter()
        arguments, checkpoint = _resolved(with_device(given, device, torch.cuda.is_available()))
        place = find_place(arguments.output_dir, checkpoint.source)
        if ignored_batch_size(batch_size):
            logger.info("batch_size=%s is ignored: the engine batches by itself, and no result depends on it "
                        "(max_num_seqs bounds the requests in a step)", batch_size)  # fmt: skip
        config = arguments.config
        self.arguments = arguments
        set_add_bos_token(checkpoint.tokenizer, arguments.add_bos_token)
        self.llm = self._made(checkpoint, config)
        self.tokenizer: Any = self.llm.tokenizer
        self._pieces = PieceTokenizer(self.tokenizer)  # it encodes the lines that few-shot prompts share once
        self._template: ChatTemplate | None = None
        self._recorder: EvaluationRecorder | None = None
        self._identity: dict[str, Any] | None = None  # the engine's identity, for the cache
        if place is not None:
            self._recorder = EvaluationRecorder(place, self.llm, arguments, begin, time.perf_counter())

    def _made(self, checkpoint: Checkpoint, config: Config) -> LLM:
        """The engine. If answers are kept in a cache, its weights are loaded only when they are needed."""
        settings: Any = {
            "batch_invariant": config.batch_invariant,
            "numerics": config.numerics,
            "engine": config.engine,
        }
        if config.cache.path is None:
            return LLM(checkpoint, **settings)
        return cast(LLM, DeferredLLM(checkpoint, **settings))  # a DeferredLLM has all that this model asks of an LLM

    # -- what lm-eval asks about the model ---------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's EOS token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, else EOS."""
        return prefix_token_id(self.tokenizer)

    @property
    def max_length(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return self.llm.settings.max_model_len

    @property
    def max_gen_toks(self) -> int:
        """How many tokens an answer may have if its task names no length."""
        return self.arguments.max_gen_toks

    @property
    def device(self) -> Any:
        """torch's device of the weights."""
        return self.llm.settings.device

    @property
    def rank(self) -> int:
        """Always 0: with more ranks lm-eval would draw each rank's exemplars by itself, and prompts would change."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers and chat settings apart in lm-eval's request cache: by content, not by path."""
        plain = plain_tokenizer(self.tokenizer) or {}
        chat = f"{self.arguments.enable_thinking}-{self._date}"
        return f"{self.arguments.config.model.name}-{str(plain.get('sha256'))[:16]}-{chat}".replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Facts for the results that lm-eval writes once a run is over: the model, and the folder of its records."""
        checkpoint, settings = self.llm.checkpoint, self.llm.settings
        info: dict[str, Any] = {
            "model_num_parameters": num_parameters(self.llm.spec),
            "model_dtype": str(settings.dtype),
            "model_revision": self.arguments.config.model.revision or "main",
            "model_sha": checkpoint.revision or "",  # the Hub's commit, as lm-eval's hf model reports it
        }
        if self._recorder is not None and (records := self._recorder.end()):
            info["evalengine"] = {**records, "numerics": settings.numerics}
        return info

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Called for lm-eval's `--use_cache`. Answers out of that cache bypass this model: records would have gaps.

        Raises: ConfigError if records were asked for by name.
        """
        if getattr(cache_hook, "dbdict", None) is not None and self._recorder is not None:
            if self.arguments.output_dir is not None:
                raise ConfigError("output_dir: with --use_cache not every answer is computed, and records would have "
                                  "gaps; leave one of the two out")  # fmt: skip
            logger.warning("--use_cache: no records are written, since answers out of a cache have none")
            self._recorder = None
        super().set_cache_hook(cache_hook)

    # -- text and tokens ---------------------------------------------------------------------------------------------

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids as lm-eval's hf model has them; `None`: what the tokenizer or `add_bos_token` adds."""
        return encode_scored(self._pieces, string, add_special_tokens, self.arguments.add_bos_token)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt that the model's own template makes of messages; without a generation prompt the last message is
        left open, to be continued.

        Raises: ConfigError for a model without a template, and for messages that it refuses.
        """
        if self._template is None:
            thinking = self.arguments.enable_thinking
            variables = {} if thinking is None else {"enable_thinking": thinking}
            self._template = ChatTemplate(self.tokenizer, self._date, OF_LM_EVAL, variables)
        if self._recorder is not None:
            self._recorder.templated = True
        return rendered(self._template, chat_history, add_generation_prompt)

    @property
    def _date(self) -> str:
        return self.arguments.config.chat_template_date or TEMPLATE_DATE


def _resolved(given: dict[str, Any]) -> tuple[ModelArguments, Checkpoint]:
    """The arguments and the model they name, no weights read. Raises one ConfigError with everything that is wrong."""
    arguments, problems = read_arguments(given)
    config, checkpoint = arguments.config, None
    if "pretrained" in given:
        try:
            checkpoint = resolve_checkpoint(config.model)
        except ConfigError as error:
            problems += error.problems
    spec = None if checkpoint is None else checkpoint.spec
    problems += settings_problems(config.engine, config.batch_invariant, config.numerics, spec)
    if checkpoint is not None and checkpoint.tokenizer is None:
        problems.append("tokenizer: this model has none (load_format=dummy); name one")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    assert checkpoint is not None, "without one there is a problem"
    return arguments, checkpoint


def rendered(template: ChatTemplate, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    """The prompt; without a generation prompt the last message is left open. If a template refuses the messages,
    it is given them once more without the system message, as lm-eval's hf model does it.

    Raises: ConfigError with what the template said.
    """
    try:
        return template(messages) if add_generation_prompt else template.continued(messages)
    except ConfigError:
        others = [message for message in messages if message["role"] != "system"]
        if len(others) in (0, len(messages)):
            raise
        logger.warning("the chat template refuses the messages: tried again without the system message")
        return rendered(template, others, add_generation_prompt)
