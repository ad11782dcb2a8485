r"""What `\n` means in a text: on the command line the end of a line, elsewhere two characters that are refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evalengine.api.evaluate import flat
from evalengine.config.compose import compose_jobs
from evalengine.config.overrides import escape_problems
from evalengine.config.schema import Config
from evalengine.errors import ConfigError


def composed(*overrides: str) -> Config:
    (job,) = compose_jobs(overrides)
    return job.config


def described(text: str) -> str | None:
    return composed(f"task.description={text}").tasks["arithmetic"].description


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"Solve.\n\n", "Solve.\n\n"),  # task.description='Solve.\n\n' in a shell
        (r"'Solve.\n\n'", "Solve.\n\n"),
        (r'"Solve.\n\n"', "Solve.\n\n"),
        ("Solve, and:\n\n", "Solve, and:\n\n"),  # $'Solve, and:\n\n' in a shell
        (r"Solve.\r\n\tNow", "Solve.\r\n\tNow"),
        (r"'a\nthink'", "a\nthink"),
        (r"'Is $a \neq b$, \nabla, \tau, \rho?\nSay so.'", "Is $a \\neq b$, \\nabla, \\tau, \\rho?\nSay so."),
        (r"'Write \\n between lines'", r"Write \n between lines"),
        (r"a\\nb", r"a\nb"),  # Hydra makes one backslash of two outside quotes
        (r"""'{{rows | join("\n")}}\n'""", '{{rows | join("\\n")}}\n'),
        (r"\d+\.", r"\d+\."),
    ],
)
def test_the_command_line(typed: str, meant: str) -> None:
    assert described(typed) == meant


@pytest.mark.parametrize("typed", [r"[\n\n,Q:]", r'["\n\n","Q:"]', r"['\n\n','Q:']"])
def test_stop_strings(typed: str) -> None:
    """As the shells hand over `until=["\\n\\n"]`, without quotes of their own, and in single quotes."""
    for word in (f"task.generation.until={typed}", f"task.generation={{until: {typed}}}"):
        assert composed(word).tasks["arithmetic"].generation.until == ["\n\n", "Q:"]


def test_every_text_and_nothing_else() -> None:
    config = composed(
        *(f"task.{name}=a\\nb" for name in ("description", "gen_prefix", "template.doc_to_text")),
        *(f"task.template.{name}=\\n" for name in ("target_delimiter", "fewshot_config.fewshot_delimiter")),
        *("apply_chat_template=true", "system_instruction=a\\n", "chat_template_args={effort: 'a\\n'}"),
        *("model.think_end_token='</think>\\n'", "task.dataset.path=C:\\new", "task.fewshot_file=C:\\rows"),
    )
    task = config.tasks["arithmetic"]
    assert task.description == task.gen_prefix == task.template.doc_to_text == "a\nb"
    assert task.template.target_delimiter == task.template.fewshot_config.fewshot_delimiter == "\n"
    assert config.system_instruction == config.chat_template_args["effort"] == "a\n"
    assert config.model.think_end_token == "</think>\n"
    assert (task.dataset.path, task.fewshot_file) == ("C:\\new", "C:\\rows")


def test_a_long_text_takes_no_time() -> None:
    """Each beginning of Jinja's code would be searched to the text's end: 41 s for 200,000 characters."""
    start = time.monotonic()
    assert not [*escape_problems("{{" * 100_000 + "{%" * 100_000, "x", "")]
    assert [*escape_problems("{{" * 100_000 + "\\n", "x", "")]
    assert time.monotonic() - start < 5


def test_a_sweep_keeps_its_words() -> None:
    jobs = compose_jobs(["task.description='a\\n',b"], multirun=True)
    assert [job.config.tasks["arithmetic"].description for job in jobs] == ["a\n", "b"]
    assert jobs[0].overrides == ("task.description='a\\n'",)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (r"description: 'Solve.\n\n'", "description: in Solve.\\n\\n"),
        (r"doc_to_text: Q{{q}}\nA", "template.doc_to_text: in Q{{q}}\\nA"),
        (r"target_delimiter: '\t'", "template.target_delimiter: in \\t"),
        (r"generation_kwargs: {until: ['\n']}", "generation.until: in \\n"),
    ],
)
def test_a_yaml_file(line: str, where: str, tmp_path: Path) -> None:
    """Its own double quotes make ends of lines; lm-eval puts the two characters of other quotes into prompts."""
    file, key = tmp_path / "mine.yaml", line.partition(":")[0]
    kept = {"doc_to_text": "'{{q}}'", "doc_to_target": "'{{a}}'", "dataset_path": "x", "test_split": "test"}
    head = "".join(f"{name}: {value}\n" for name, value in kept.items() if name != key)
    file.write_text(head + line + "\n")
    with pytest.raises(ConfigError) as caught:
        composed(f"task={file}")
    (problem,) = caught.value.problems
    assert f"tasks.mine.{where} the \\" in problem and 'YAML reads \\n in double quotes, as "\\n"' in problem
    key, _, value = line.partition(": ")
    quoted = value.replace("'", '"') if "'" in value else f'"{value}"'
    file.write_text(f"{head}{key}: {quoted}\n")
    assert composed(f"task={file}").tasks["mine"]


def test_a_file_keeps_latex_and_what_jinja_reads(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    lines = ["dataset_path: x", "test_split: test", "doc_to_target: a", r"description: 'Is $a \neq b$? '"]
    file.write_text("\n".join([*lines, r"""doc_to_text: '{{q}}{{"\n"}}{% if a == "\n" %}x{% endif %}'""", ""]))
    task = composed(f"task={file}").tasks["mine"]
    assert task.description == r"Is $a \neq b$? " and r'{{"\n"}}' in task.template.doc_to_text


@pytest.mark.parametrize(
    ("text", "meant"), [("a\n", "a\n"), (r"\neq \\n", "\\neq \\n"), ("C:\\\\x", "C:\\\\x"), (r"\d+", r"\d+")]
)
def test_a_text_from_python_is_taken_as_it_is(text: str, meant: str) -> None:
    problems: list[str] = []
    (job,) = compose_jobs([], settings=flat({"system_instruction": text, "apply_chat_template": True}, problems))
    assert job.config.system_instruction == meant and not problems


def test_two_characters_from_python_are_refused() -> None:
    problems: list[str] = []
    flat({"task": {"generation": {"until": [r"\n\n"]}}, "system_instruction": r"a\n", "data_dir": r"C:\new"}, problems)
    assert [problem.partition(":")[0] for problem in problems] == ["task.generation.until", "system_instruction"]
    assert r'write "\n", neither "\\n" nor r"\n"' in problems[0]
