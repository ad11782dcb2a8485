"""Mutated chat templates: transformers' own text, or a sentence; never a hang, and the same text in another process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from evalengine.config.schema import TEMPLATE_DATE
from evalengine.engine.text import chat_template as chat
from evalengine.engine.text.chat_template import ChatTemplate
from evalengine.errors import ConfigError
from tests.fuzz.cases import Case, cases

SEEDS = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{{ ns.last }}{{ messages[-1].content | upper }}{{ messages | tojson(indent=1) }}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% macro say(m) %}"
    "[{{ m.content }}]{% endmacro %}{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{{ say(m) }}{% endfor %}",
    "{% generation %}{{ messages | map(attribute='role') | join(',') }}{% endgeneration %}{{ 'a' ~ 1 }}",
)
PIECES = [
    *("{{ ", " }}", "{% ", " %}", "{%- ", "-%}", "{# ", " #}", "messages", "m", ".content", "['role']", " | ", "'"),
    *("tojson", "length", "join", "list", "first", "random", "lipsum()", "loop.index", "range(9)", "* 3", " in "),
    *("none", "true", "(", ")", "[", "]", "[0]", "namespace(a=1)", "dict(a=1)", "\n", "\x00", "\ud800", "}"),
    *("{% endfor %}", "{% endif %}", "{% else %}", "{% for m in messages %}", "{% if m %}", "raise_exception('x')"),
    *(".__class__", "|attr('items')", ".items", "* 99999999", "range(99999)", "recursive", "strftime_now('%d')"),
]
MESSAGES = (
    [{"role": "user", "content": " 1 + 1? "}],
    [{"role": "system", "content": "é <b>"}, {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "{{ x }}"}] * 5,
)


def mutated(case: Case) -> str:
    """A seed template with up to four pieces put in, cut out or doubled."""
    text = case.choice(SEEDS)
    for _ in range(case.randint(0, 4)):
        start, stop = sorted(case.randint(0, len(text)) for _ in range(2))
        kind = case.random()
        if kind < 0.6:
            text = text[:start] + case.choice(PIECES) + text[start:]
        elif kind < 0.8:
            text = text[:start] + text[min(stop, start + 9) :]
        else:
            text = text[:start] + text[start : start + 30] + text[start:]
    return text


def our_text(template: str, messages: list[dict[str, str]]) -> str:
    """The text that evalengine's ChatTemplate gives."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer: Any = SimpleNamespace(
        chat_template=template, special_tokens_map=special, get_chat_template=lambda: template
    )
    return ChatTemplate(tokenizer, TEMPLATE_DATE)(messages)


def test_mutated_templates_give_transformers_text_or_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMITS", {"seconds": 1, "bytes": 1 << 28, "characters": 10**5})
    rendered = 0
    for case in cases("chat_template", 20):
        template, messages = mutated(case), case.choice(MESSAGES)
        with case.named(template):
            try:
                text = our_text(template, messages)
            except ConfigError as error:
                message = str(error)
                assert message.startswith("the model's chat template ") and "\n" not in message and len(message) < 600
                message.encode("utf-8")
                continue
            rendered += 1
            if "strftime_now" not in template:
                (expected,), _ = chat_template_utils.render_jinja_template(
                    [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
                )
                assert text == expected
            if rendered % 3 == 0:
                assert text == our_text(template, messages), "another process, another text"
    assert rendered > 2
