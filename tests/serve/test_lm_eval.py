"""lm-eval's `local-completions` against the server is our model in lm-eval's own process, answer by answer."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first
from tests.parity.lm_eval_runs import shorten_pages

# isort: split

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parity.local_tasks import rows_for
from tests.serve.running import Running

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'evalengine[lm-eval]'")
for needed in ("aiohttp", "tenacity"):
    pytest.importorskip(needed, reason="needs lm-eval's API models: pip install lm-eval[api]")
TASKS = ("gsm8k", "hellaswag", "wikitext")
LENGTH = 320  # tokens of a window; a page needs two
LIMIT = 3


@pytest.fixture(scope="module")
def task_files(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """lm-eval's own task files, over a few local rows."""
    theirs = Path(lm_eval.__file__).parent / "tasks"
    paths = []
    for name in TASKS:
        folder = tmp_path_factory.mktemp("rows") / name
        folder.mkdir()
        files = rows_for(name, folder)
        settings = {"include": str(theirs / name / f"{name}.yaml"), "task": name, "dataset_path": "json",
                    "dataset_name": None, "dataset_kwargs": {"data_files": files}}  # fmt: skip
        if name == "gsm8k":
            until = ["Question:", "</s>", "<|im_end|>"]
            settings["generation_kwargs"] = {"until": until, "do_sample": False, "max_gen_toks": 24}
        if name == "wikitext":
            shorten_pages(Path(files["test"]))
        (folder / "theirs.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        paths.append(str(folder / "theirs.yaml"))
    return paths


@contextmanager
def offline() -> Iterator[None]:
    """lm-eval looks every row's source up on the Hub, and reads its own log's level from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def evaluated(kind: Any, tasks: list[str], **arguments: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    with offline():
        result = lm_eval.simple_evaluate(
            model=kind, model_args=arguments or None, tasks=tasks, limit=LIMIT, num_fewshot=0, bootstrap_iters=10,
            task_manager=TaskManager(include_defaults=False),
        )  # fmt: skip
    assert isinstance(result, dict)
    return result


@pytest.fixture(scope="module")
def in_process(task_files: list[str]) -> dict[str, Any]:
    from evalengine.integrations.lm_eval.model import EvalEngineLM

    return evaluated(EvalEngineLM(pretrained="asset:tinymath", device="cpu", max_model_len=LENGTH), task_files)


@pytest.mark.parametrize("concurrent", [1, 8])
def test_local_completions_are_our_model(
    served: Running, task_files: list[str], in_process: dict[str, Any], concurrent: int
) -> None:
    arguments = {"base_url": f"{served.url}/v1/completions", "model": "tinymath", "num_concurrent": concurrent,
                 "max_length": LENGTH + 2}  # fmt: skip  # lm-eval keeps one token for its request, one for windows
    if concurrent == 1:
        arguments["batch_size"] = 4  # lists of token-id lists
    theirs = evaluated("local-completions", task_files, **arguments)
    compared = 0
    for task, samples in in_process["samples"].items():
        for ours, other in zip(samples, theirs["samples"][task], strict=True):
            assert (ours["doc_hash"], ours["prompt_hash"]) == (other["doc_hash"], other["prompt_hash"])
            for a, b in zip(ours["resps"], other["resps"], strict=True):
                _same(a[0], b[0])
                compared += 1
    assert compared == LIMIT * (2 + 4 + 1)  # gsm8k has two filters
    for task, values in in_process["results"].items():
        for name, value in values.items():
            if isinstance(value, float):
                assert theirs["results"][task][name] == pytest.approx(value, rel=1e-12), (task, name)


def _same(ours: Any, theirs: Any) -> None:
    """Equal texts and flags; sums of the same logprobs, which lm-eval adds up without `fsum`."""
    if isinstance(ours, str):
        assert ours == theirs and ours
        return
    (a, greedy), (b, said) = (value if isinstance(value, tuple) else (value, None) for value in (ours, theirs))
    assert greedy == said and math.isclose(a, b, rel_tol=1e-14)
