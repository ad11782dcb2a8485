"""Answers kept between runs: the same bytes, whatever was in the cache, and never another model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import evalengine
from evalengine import version
from evalengine.engine.llm import LLM
from evalengine.errors import ConfigError
from evalengine.records.journal import Entry, Journal
from tests.e2e.cache_runs import ROWS, SETTINGS, TOKENS, counts, run
from tests.e2e.command import Run, call, over

SAMPLED = ("task.generation.temperature=0.8", "task.generation.top_k=20")


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes any attempt to load weights fail."""

    def load(self: LLM) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(LLM, "_load", load)


def test_without_cold_and_warm_are_the_same_bytes(warm_cache: tuple[Path, Run], tmp_path: Path) -> None:
    """Runs without a cache, with an empty one and with a full one write the same bytes."""
    cache, cold = warm_cache
    without, hot = run(tmp_path / "without"), run(tmp_path / "hot", f"cache={cache}", "engine.max_num_seqs=1")
    assert counts(cold) == (0, ROWS) and counts(hot) == (ROWS, 0) and "cache" not in without.manifest
    for cached_run in (cold, hot):
        assert cached_run.digest == without.digest
        assert cached_run.manifest["run_id"] == without.manifest["run_id"]
        assert cached_run.manifest["identity"] == without.manifest["identity"]
        for name in ("records.parquet", "tokens.json", "digest.txt"):
            assert (cached_run.folder / name).read_bytes() == (without.folder / name).read_bytes()
        assert cached_run.results == without.results
    assert hot.manifest["counts"]["cached_requests"] == ROWS and hot.manifest["counts"]["resumed_requests"] == 0
    assert hot.manifest["counts"]["output_tokens"] == 0, "of the requests that ran"


@pytest.mark.usefixtures("unloadable")
def test_a_run_of_hits_loads_no_weights_and_journals_nothing(
    warm_cache: tuple[Path, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(self: Journal, entry: Entry) -> None:
        raise AssertionError("an answer of the cache was journaled")

    monkeypatch.setattr(Journal, "append", append)
    assert run(tmp_path, f"cache={warm_cache[0]}").digest == warm_cache[1].digest


@pytest.mark.usefixtures("unloadable")
def test_that_check_can_fail(warm_cache: tuple[Path, Run], tmp_path: Path) -> None:
    """A run with one request that the cache lacks does load weights, which `unloadable` turns into an error."""
    done = call(f"output_dir={tmp_path / 'out'}", *over(SETTINGS, f"cache={warm_cache[0]}", f"limit={ROWS + 1}"))
    assert done.code == 1 and "weights were loaded" in done.err
    assert not (tmp_path / "out").exists(), "nothing is written before the weights are there"


def test_limits_orders_and_tasks_share_answers(copied_cache: Path, tmp_path: Path) -> None:
    """Answers are found again under another limit, and for the same rows in another file and order."""
    longer_run = run(tmp_path / "more", f"cache={copied_cache}", f"limit={ROWS + 2}")
    assert counts(longer_run) == (ROWS, 2)
    rows = (files("evalengine.assets") / "tinymath" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    reversed_rows = tmp_path / "rows.jsonl"
    reversed_rows.write_text("\n".join(reversed(rows)) + "\n", encoding="utf-8")
    reversed_run = run(tmp_path / "again", f"cache={copied_cache}", f"task.dataset.path={reversed_rows}")
    assert counts(reversed_run) == (ROWS, 0)


@pytest.mark.parametrize(
    ("settings", "hits"),
    [
        (("engine.dtype=float32",), 0),
        (("task.generation.max_gen_toks=12",), 0),
        (("task.generation.until=['x']",), 0),
        (("logprobs=2",), 0),
        (("model.think_end_token=5",), 0),
        (SAMPLED, 0),
        (
            (
                "model.name=another",
                "engine.block_size=16",
                "engine.max_num_batched_tokens=64",
                "engine.enable_prefix_caching=false",
            ),
            ROWS,
        ),
        (("seed=3", "engine.max_model_len=600"), ROWS),  # Temperature 0 draws nothing, and every prompt fits.
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_an_answer_depends_on(copied_cache: Path, tmp_path: Path, settings: Sequence[str], hits: int) -> None:
    """Settings that can change an answer find none in the cache, and all others find every one."""
    assert counts(run(tmp_path, f"cache={copied_cache}", *settings)) == (hits, ROWS - hits)


def test_sampled_answers_are_kept_by_their_noise(copied_cache: Path, tmp_path: Path) -> None:
    """Sampled answers are found again under the same seed, and not under another."""
    cold = run(tmp_path / "cold", f"cache={copied_cache}", *SAMPLED)
    hot = run(tmp_path / "hot", f"cache={copied_cache}", *SAMPLED)
    assert counts(hot) == (ROWS, 0) and hot.digest == cold.digest
    assert counts(run(tmp_path / "other", f"cache={copied_cache}", *SAMPLED, "seed=1")) == (0, ROWS)


def test_alternatives_are_kept_bit_for_bit(copied_cache: Path, tmp_path: Path) -> None:
    cold, hot = (run(tmp_path / name, f"cache={copied_cache}", "logprobs=3") for name in ("cold", "hot"))
    assert counts(cold) == (0, ROWS) and counts(hot) == (ROWS, 0)
    assert (cold.folder / "records.parquet").read_bytes() == (hot.folder / "records.parquet").read_bytes()
    assert all(record.top_ids is not None and len(record.top_ids) for record in hot.records)


def test_scores_are_kept(tmp_path: Path) -> None:
    """Log-likelihoods over a shared context are kept, too; the task is a file of lm-eval's form."""
    rows = [{"q": f"{i} + 2 =", "choices": [f"{i + 2}", f"{i + 3} or more"], "gold": 0} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: choices\n'
        "doc_to_target: gold\n",
        encoding="utf-8",
    )
    task = f"task={tmp_path / 'mine.yaml'}", "task.generation.max_gen_toks=null"
    without = run(tmp_path / "without", *task)
    cold, hot = (run(tmp_path / name, *task, f"cache={tmp_path / 'cache'}") for name in ("cold", "hot"))
    assert counts(cold) == (0, 2 * ROWS) and counts(hot) == (2 * ROWS, 0)
    assert without.digest == cold.digest == hot.digest
    assert (without.folder / "records.parquet").read_bytes() == (hot.folder / "records.parquet").read_bytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, in a folder of its name."""
    return Path(shutil.copytree(str(files("evalengine.assets") / "tinymath"), tmp_path / "tinymath"))


def test_a_copy_elsewhere_is_the_same_model(copied_cache: Path, tmp_path: Path, model: Path) -> None:
    assert counts(run(tmp_path / "out", f"cache={copied_cache}", f"model.path={model}", "model.name=tinymath")) == (
        ROWS,
        0,
    )


def other_weights(model: Path) -> None:
    """Multiplies one norm's weights, so that the folder holds another model."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = tensors[name] * 1.125
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def edit(file: Path, **values: Any) -> None:
    """Sets values of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def test_another_model_of_the_same_name_gets_none_of_its_answers(
    copied_cache: Path, tmp_path: Path, model: Path
) -> None:
    """lm-eval's cache gives model B the answers of model A (EleutherAI/lm-evaluation-harness issue 4063)."""
    other_weights(model)
    settings = (f"model.path={model}", "model.name=tinymath")
    cached, without = run(tmp_path / "cached", f"cache={copied_cache}", *settings), run(tmp_path / "without", *settings)
    assert counts(cached) == (0, ROWS) and cached.digest == without.digest


@pytest.mark.parametrize("changed", ["rope_theta", "eos", "repetition_penalty", "tokenizer"])
def test_the_same_weights_otherwise_understood_are_another_model(
    copied_cache: Path, tmp_path: Path, model: Path, changed: str
) -> None:
    """Equal weights with another configuration or tokenizer find no answer in the cache."""
    if changed == "rope_theta":
        edit(model / "config.json", rope_theta=20000.0)
    elif changed == "eos":
        edit(model / "generation_config.json", eos_token_id=[0, 9])
    elif changed == "repetition_penalty":
        edit(model / "generation_config.json", repetition_penalty=1.5)
    else:
        tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        edit(model / "tokenizer.json", added_tokens=[{**t, "rstrip": True} for t in tokenizer["added_tokens"]])
    settings = (f"model.path={model}", "model.name=tinymath")
    assert counts(run(tmp_path / "out", f"cache={copied_cache}", *settings)) == (0, ROWS)


def test_another_contract_finds_nothing(copied_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "CONTRACT_VERSION", version.CONTRACT_VERSION + 1)
    assert counts(run(tmp_path / "out", f"cache={copied_cache}")) == (0, ROWS)


def test_python_takes_a_cache(copied_cache: Path, tmp_path: Path) -> None:
    """`evaluate` takes a cache as a path, with an audit, and beside a lent LLM, and refuses it for fast numerics."""
    settings: dict[str, Any] = {
        "limit": ROWS,
        "task": {"generation": {"max_gen_toks": TOKENS}},
        "output_dir": str(tmp_path),
        "progress": False,
    }
    result = evalengine.evaluate("asset:tinymath", ["arithmetic"], cache=str(copied_cache), **settings)
    assert result.manifest["cache"]["hits"] == ROWS
    audited_cache = {"path": str(copied_cache), "audit": 0.5}
    result = evalengine.evaluate("asset:tinymath", ["arithmetic"], cache=audited_cache, **settings, resume="never")
    assert result.manifest["cache"]["audited"] == 2
    with LLM("asset:tinymath", device="cpu", max_num_seqs=2) as llm:
        result = evalengine.evaluate(llm, ["arithmetic"], cache=str(copied_cache), **settings, resume="never")
    assert result.manifest["cache"]["hits"] == ROWS
    with pytest.raises(ConfigError, match="cache"):
        evalengine.evaluate(
            "asset:tinymath", ["arithmetic"], cache=str(copied_cache), batch_invariant=False, **settings
        )


@pytest.fixture
def lm_eval_model(tmp_path: Path) -> Iterator[Any]:
    """Makes our model for lm-eval; all models that a test makes share a cache."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from evalengine.integrations.lm_eval.model import EvalEngineLM

    def make(**arguments: Any) -> Any:
        return EvalEngineLM(pretrained="asset:tinymath", device="cpu", cache=str(tmp_path / "cache"), **arguments)

    yield make


def test_the_model_of_lm_eval_takes_a_cache(
    lm_eval_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our model for lm-eval finds scores and generations in its cache, and loads no weights for them."""
    from lm_eval.api.instance import Instance

    def scoring_requests() -> list[Any]:
        pairs = [("2 + 2 =", " 4"), ("2 + 2 =", " 5"), ("3 + 2 =", " 5")]
        return [Instance("loglikelihood", {}, pair, 0, ("t", i, 1)) for i, pair in enumerate(pairs)]

    def generation_requests() -> list[Any]:
        return [Instance("generate_until", {}, ("Question: 2 + 2?\nAnswer:", {"until": ["\n"]}), 0, ("g", 0, 1))]

    cold_model = lm_eval_model()
    answers = cold_model.loglikelihood(scoring_requests()), cold_model.generate_until(generation_requests())
    monkeypatch.setattr(LLM, "_load", lambda self: pytest.fail("weights were loaded"))
    warm_model = lm_eval_model(output_dir=str(tmp_path / "records"), **{"cache.audit": 0})
    assert (warm_model.loglikelihood(scoring_requests()), warm_model.generate_until(generation_requests())) == answers
    (folder,) = (tmp_path / "records").glob("*/records-*")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["cache"]["hits"], manifest["cache"]["misses"]) == (4, 0)
    assert manifest["counts"]["cached_requests"] == 4 and manifest["counts"]["output_tokens"] == 0
    assert warm_model.loglikelihood(scoring_requests()) == answers[0]  # asked again: the next evaluation
    (folder,) = {*(tmp_path / "records").glob("*/records-*")} - {folder}
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["cache"]["hits"] == 3 == manifest["counts"]["cached_requests"]
    with pytest.raises(ConfigError, match="fast numerics"):
        lm_eval_model(batch_invariant=False)
