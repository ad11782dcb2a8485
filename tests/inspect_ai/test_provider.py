"""inspect_ai on our engine: its solvers and scorers over local rows, by the name that its entry points give."""

from __future__ import annotations

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect_ai: pip install 'evalengine[inspect]'")

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import MemoryDataset, Sample, json_dataset
from inspect_ai.model import ChatMessageUser, ContentImage, GenerateConfig, Model, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

import evalengine.integrations.inspect_ai.registry  # noqa: F401  # what inspect_ai's entry points load
from evalengine import LLM, SamplingParams
from evalengine.errors import ConfigError
from tests.e2e.command import call

SMALL: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "block_size": 64}


def tasks(data: Path) -> list[Task]:
    """GSM8K, ARC and HellaSwag of inspect_evals with their prompts, few-shot examples and scorers, over local rows."""
    pytest.importorskip("inspect_evals", reason="needs inspect_evals, whose tasks these are: pip install inspect_evals")

    def local(path: str, split: str, sample_fields: Any, limit: int = 4, **_: Any) -> Any:
        folder = {"openai/gsm8k": "gsm8k", "allenai/ai2_arc": "arc_easy", "Rowan/hellaswag": "hellaswag"}[path]
        return json_dataset(str(data / folder / f"{split}.jsonl"), sample_fields, limit=limit)

    made = []
    for name, task, arguments in (("gsm8k", "gsm8k", {"fewshot": 1, "shuffle_fewshot": False}),
                                  ("arc", "arc_easy", {}), ("hellaswag", "hellaswag", {})):  # fmt: skip
        module = import_module(f"inspect_evals.{name}.{name}")
        with patch.object(module, "hf_dataset", local):
            made.append(getattr(module, task)(**arguments))
    return made


@pytest.fixture
def model() -> Iterator[Model]:
    with get_model("evalengine/tinymath", memoize=False, **SMALL) as found:
        yield found


def run(tasks: Any, model: Model, folder: Path, **settings: Any) -> list[Any]:
    logs = eval(tasks, model=model, log_dir=str(folder), display="none", fail_on_error=True, **settings)
    assert [log.status for log in logs] == ["success"] * len(logs), logs[0].error
    return list(logs)


def said(logs: list[Any]) -> dict[tuple[str, Any, int], Any]:
    """(task, sample, epoch) -> the answers with their logprobs."""
    return {
        (log.eval.task, sample.id, sample.epoch): [
            (c.message.text, c.stop_reason, None if c.logprobs is None else [one.logprob for one in c.logprobs.content])
            for c in sample.output.choices
        ]
        for log in logs
        for sample in log.samples
    }


def test_three_tasks_are_scored_and_no_batch_changes_a_bit(data_dir: Path, tmp_path: Path, model: Model) -> None:
    asked = {"max_tokens": 8, "temperature": 0.0, "logprobs": True, "top_logprobs": 1}
    many = run(tasks(data_dir), model, tmp_path / "many", **asked)
    api: Any = model.api
    assert api._llm.stats.largest_batch >= 4, "requests that come one by one run together"
    one = run(tasks(data_dir), model, tmp_path / "one", max_connections=1, max_samples=1, **asked)
    assert said(many) == said(one) and len(said(many)) == 12
    for log, other in zip(many, one, strict=True):
        files = [item.location.removeprefix("file://") for item in (log, other)]
        compared = call("compare", *files, "--level", "answers")
        assert compared.code == 0 and "Every output and every answer is the same" in compared.out, compared.err
        assert "A is a log of inspect_ai" in compared.out and "% cut at the limit" in compared.out
        assert log.results is not None and log.results.scores[0].metrics["accuracy"].value >= 0
        assert {sample.output.stop_reason for sample in log.samples} <= {"stop", "max_tokens"}
    first = many[0].samples[0]
    assert [message.role for message in first.messages] == ["system", "user", "assistant"]
    with LLM("asset:tinymath", **SMALL) as llm:
        talk = [{"role": message.role, "content": message.text} for message in first.messages[:-1]]
        (output,) = llm.chat(talk, SamplingParams(max_tokens=8))
    assert first.output.completion == output.text
    logprobs = [one.logprob for one in first.output.choices[0].logprobs.content]
    assert np.array(logprobs, dtype=np.float32).tobytes() == output.logprobs.tobytes()
    assert first.output.usage.input_tokens == len(output.prompt_ids)


def test_epochs_are_samples_that_a_second_run_repeats(tmp_path: Path, model: Model) -> None:
    task = Task(dataset=MemoryDataset([Sample(input="What is 3 plus 4?", target="7")]), solver=generate(),
                scorer=includes(), epochs=Epochs(3))  # fmt: skip
    first, again = (said(run(task, model, tmp_path / name, max_tokens=6)) for name in ("a", "b"))
    assert first == again and len({answers[0][0] for answers in first.values()}) > 1
    other = said(run(task, model, tmp_path / "c", max_tokens=6, seed=5))
    assert other != first


def answer(model: Model, text: Any, **config: Any) -> Any:
    return asyncio.run(model.generate(text, config=GenerateConfig(**config)))


def test_what_generate_config_asks(model: Model) -> None:
    whole = answer(model, "What is 3 plus 4?", temperature=0, max_tokens=12)
    stop = whole.completion[4:8]
    stopped = answer(model, "What is 3 plus 4?", temperature=0, max_tokens=12, stop_seqs=[stop])
    assert (whole.stop_reason, stopped.stop_reason) == ("max_tokens", "stop")
    assert stopped.completion == whole.completion.partition(stop)[0]
    several = answer(model, "What is 3 plus 4?", max_tokens=6, num_choices=3)
    assert len({c.message.text for c in several.choices}) > 1 and several.metadata["evalengine"]["seed"] > 0
    assert answer(model, "flowers " * 1100, max_tokens=4).stop_reason == "model_length"
    for name, value in (("frequency_penalty", 1.0), ("reasoning_mode", "standard"), ("reasoning_effort", "low")):
        with pytest.raises(ValueError, match=f"{name}: not built"):
            answer(model, "a", **{name: value})
    picture = [ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AAAA")])]
    with pytest.raises(ValueError, match="something else than text"):
        answer(model, picture)


def test_a_thinking_is_reasoning_content() -> None:
    with get_model("evalengine/tinymath", memoize=False, think_end_token=" = ", **SMALL) as model:
        (found,) = answer(model, "What is 3 plus 4?", temperature=0, max_tokens=24).choices
    kinds = [part.type for part in found.message.content]
    assert kinds == ["reasoning", "text"] and found.message.content[0].reasoning


def test_the_answers_are_a_run_that_check_computes_again(data_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with get_model("evalengine/tinymath", memoize=False, record=str(folder), **SMALL) as model:
        logs = run(tasks(data_dir)[:1], model, tmp_path / "logs", max_tokens=6, temperature=0.0)
    (path,) = folder.iterdir()
    done = call("check", str(path))
    assert done.code == 0 and "4 of 4 items" in done.out and "verdict: AGREES" in done.out, done.err
    receipts = {s.output.metadata["evalengine"]["x-evalengine-receipt"] for log in logs for s in log.samples}
    assert len(receipts) == 4 and all(receipt.startswith("chat/") for receipt in receipts)


def test_bad_arguments_are_said() -> None:
    with pytest.raises(ConfigError, match="-M tempo: no argument of this model"):
        get_model("evalengine/tinymath", memoize=False, tempo=1)
    with pytest.raises(ConfigError, match="no_such_folder"):
        get_model("evalengine/./no_such_folder", memoize=False)
