"""What the command line refuses in its overrides, and that every command which it tells to write is one that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from evalengine.config.compose import Job, compose_jobs
from evalengine.config.overrides import SYNONYMS, known_keys
from evalengine.errors import ConfigError

WRITE = re.compile(
    r"\bwrite (run -m )?((?:'(?:[^']|'\"'\"')*'|[^\s;,')]|,(?=\S))+)"
)  # run -m, and a word as a shell reads it


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        composed(*words)
    assert "\n" not in caught.value.problems[0]
    return str(caught.value)


def composed(*words: str) -> list[Job]:
    return compose_jobs([word for word in words if word not in ("run", "-m")], multirun="-m" in words)


def fixes(message: str) -> list[list[str]]:
    """The commands that a message tells to write, as the shell hands them over."""
    return [shlex.split((found[1] or "") + found[2]) for found in WRITE.finditer(message)]


def made(job: Job) -> tuple[str, str, int | None, int]:
    """What sets the jobs of these tests apart."""
    return "+".join(job.config.tasks), job.config.model.name, job.config.limit, job.config.engine.max_num_seqs


TWO = [("arithmetic", "tinymath", 1, 256), ("arithmetic", "tinymath", 2, 256)]
MODELS = [("arithmetic", "smollm2-135m", None, 256), ("arithmetic", "qwen3-0.6b", None, 256)]
TASKS = [("gsm8k", "tinymath", None, 256), ("arc_easy", "tinymath", None, 256)]
BOTH = [("gsm8k+arc_easy", "tinymath", None, 256)]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["model=smollm2-135m,qwen3-0.6b"], [MODELS]),
        (["model=[smollm2-135m,qwen3-0.6b]"], [MODELS]),
        (["model=[smollm2-135m]"], [MODELS[:1]]),
        (["-m", "model=smollm2-135m,[qwen3-0.6b]"], [MODELS]),
        (["limit=1,2"], [TWO]),
        (["task=gsm8k,arc_easy"], [BOTH, TASKS]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_a_cure_makes_the_runs_that_were_meant(words: list[str], meant: list[list[tuple[str, str, int, int]]]) -> None:
    message = refused(*words)
    assert [[made(job) for job in composed(*fix)] for fix in fixes(message)] == meant, message


@pytest.mark.parametrize(
    ("words", "described"),
    [
        (["task.description=Think, then say"], "Think, then say"),
        (["task.description=it's"], "it's"),
        (["task.description=Is {{q}} = 2?"], "Is {{q}} = 2?"),
        (["task.description=a (b)"], "a (b)"),
    ],
)
def test_a_text_is_quoted_for_the_user(words: list[str], described: str) -> None:
    first, *_ = fixes(refused(*words))
    (job,) = composed(*first)
    assert job.config.tasks["arithmetic"].description == described


@pytest.mark.parametrize(
    ("group", "names"), [("model", "tinymath, qwen3-8b"), ("engine", "default"), ("cluster", "ray")]
)
def test_no_group_of_one_takes_a_list(group: str, names: str, tmp_path: Path) -> None:
    """Hydra would mix the settings of both files; so would a list of files within a file."""
    assert f"{group}=[]: a run has one {group}" in refused(f"{group}=[]")
    assert f"a run has one {group}; for a run of each write run -m {group}=a,b" in refused(f"{group}=[a,b]")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_text(
        f"# @package _global_\ndefaults: [{{override /{group}: [{names}]}}]\n"
    )
    message = refused("experiment=x", f"hydra.searchpath=['file://{tmp_path}']")
    assert f"a run has one {group}" in message


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["seed=1", "+seed=2"], "seed"),
        (["task=gsm8k", "task=arc_easy"], "task"),
        (["task.description=" + "x" * 300 + end for end in "ab"], "task.description"),
        (["cache.path=a", "cache=b"], "cache.path"),
        (["engine={max_num_seqs: 4}", "engine.max_num_seqs=8"], "engine.max_num_seqs"),
        (["experiment=noise_floor", "experiment=checkpoints"], "experiment"),
        (["hydra.searchpath=[file:///a]", "hydra.searchpath=[file:///b]"], "hydra.searchpath"),
    ],
)
def test_nothing_is_given_twice(words: list[str], name: str) -> None:
    assert f"{name}: is given as {words[0]} and as " in refused(*words)


def test_the_same_words_twice_drop_nothing() -> None:
    (job,) = composed("limit=3", "model=smollm2-135m", "model.path=x", "limit=3")
    assert made(job) == ("arithmetic", "smollm2-135m", 3, 256) and job.config.model.path == "x"


def test_the_fix_for_thinking_is_one_word_of_a_shell() -> None:
    words = ("enable_thinking=true", "apply_chat_template=true")
    ((fix,),) = fixes(refused(*words))
    (job,) = composed(*words, fix)
    assert job.config.model.think_end_token == "</think>"


def test_every_synonym_names_a_setting() -> None:
    assert {*SYNONYMS.values()} <= {*known_keys()}


@pytest.mark.parametrize("word", ["~task", "~model", "~limit", "~hydra/launcher", "~"])
def test_a_deletion_without_a_value_is_one_sentence(word: str) -> None:
    assert len(refused(word)) > len(word)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("model=smolm2", "did you mean smollm2-135m? there are: gemma-3-1b-it"),
        ("model=Qwen/Qwen3-0.6B", "did you mean qwen3-0.6b or model.path=Qwen/Qwen3-0.6B? there"),
        ("model=./here/weights", "did you mean model.path=./here/weights? there"),
        ("model=llama3", "did you mean llama-3.2-1b? there"),
        ("model=nothing", "no such model; there are: gemma-3-1b-it"),
        ("task=[gsm8k,arc_esy]", "task=arc_esy: no such task; did you mean arc_easy"),
        ("engine.batch_size=8", "did you mean engine.max_num_seqs?"),
        ("fewshot=5", "did you mean task.num_fewshot?"),
        ("tasks.arithmetic.fewshot=5", "did you mean tasks.arithmetic.num_fewshot?"),
        ("dtype=fp16", "did you mean engine.dtype?"),
        ("batch_size='$(id)'", "did you mean engine.max_num_seqs?"),
        ("task=./x.csv", "task=./x.csv: no such task; there are: aime"),
        ("=5", "=5: no such setting"),
        ("task=''", "task=: no such task; there are: aime"),
        ("task=GSM8K", "task=GSM8K: no such task; did you mean gsm8k"),
    ],
)
def test_a_near_name_is_suggested(word: str, hint: str) -> None:
    assert hint in refused(word)
