"""Arguments of a chat template, and answers that the prompt begins: the sample holds what the model saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import SHORT, Run, call, finished, with_more_template

ONCE = ("progress=false", "limit=1", SHORT)


def prompt(run: Run) -> str:
    """The prompt in the run's first sample."""
    return str(run.samples("arithmetic")[0]["arguments"]["gen_args_0"]["arg_0"])


def test_an_answer_is_begun_in_plain_text_and_in_a_conversation(tmp_path: Path) -> None:
    begun = ("task.gen_prefix='Let us see:'",)
    plain = finished(tmp_path / "a", *ONCE)
    run = finished(tmp_path / "b", *ONCE, *begun)
    assert prompt(run) == prompt(plain) + " Let us see:", "a space, where neither side has any"
    assert run.records[0].prompt_ids != plain.records[0].prompt_ids
    assert run.manifest["identity"]["tasks"]["arithmetic"]["gen_prefix"] == "Let us see:"
    assert "gen_prefix" not in plain.manifest["identity"]["tasks"]["arithmetic"]
    chat = finished(tmp_path / "c", *ONCE, *begun, "apply_chat_template=true")
    assert prompt(chat).endswith("<|im_start|>assistant\nLet us see:"), "the message stays open"


def test_a_template_is_told_more(tmp_path: Path) -> None:
    """`chat_template_args` reach the template and the run's identity; one that the template does not read is
    refused."""
    model = with_more_template(tmp_path / "model", "{{ effort | default('') }}")
    settings = (f"model.path={model}", "apply_chat_template=true", *ONCE)
    run = finished(tmp_path / "a", *settings, "chat_template_args={effort: high}")
    assert prompt(run).endswith("<|im_start|>assistant\nhigh")
    assert run.manifest["identity"]["chat_template_args"] == {"effort": "high"}
    unread = call(*settings, "chat_template_args={effrt: high}")
    assert unread.code == 2 and 'chat_template_args.effrt="high": the model\'s chat template does not' in unread.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["chat_template_args={a: 1}"], "chat_template_args: has no effect without a chat template"),
        (["apply_chat_template=true", "chat_template_args={tools: 1}"], "chat_template_args: tools: reserved"),
        (
            ["apply_chat_template=true", "enable_thinking=false", "chat_template_args={enable_thinking: true}"],
            "chat_template_args.enable_thinking: contradicts enable_thinking; set one of them",
        ),
    ],
)
def test_what_cannot_be_told(settings: list[str], words: str) -> None:
    """`chat_template_args` that no template would read, or that contradict other settings, are refused."""
    done = call(*settings)
    assert done.code == 2 and words in done.err, done.err
