"""Applies the model's chat template in the way lm-eval asks for it."""

from __future__ import annotations

import logging

from evalengine.engine.text.chat_template import ChatTemplate, Wording
from evalengine.errors import ConfigError
from evalengine.lm_eval_model import LOGGER

logger = logging.getLogger(LOGGER)

OF_LM_EVAL = Wording(
    where="--apply_chat_template",
    without_template="leave --apply_chat_template out",
    without_system="leave --system_instruction out",
    as_one_message="--fewshot_as_multiturn=false sends one user message",
)


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
