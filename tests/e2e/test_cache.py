"""Answers kept between runs: the same bytes, whatever was in the cache, and never another model's."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import evalengine
from evalengine import contract
from evalengine.cache import engine as cached_engine
from evalengine.cache.store import FILE, Store
from evalengine.engine.llm import LLM
from evalengine.errors import ConfigError
from tests.e2e.command import Run, call, runs

ROWS = 3
SAMPLED = ("task.generation.temperature=0.8", "task.generation.top_k=20")
SETTINGS = (f"limit={ROWS}", "engine.device=cpu", "engine.max_num_seqs=4", "progress=false", "resume=never",
            "task.generation.max_gen_toks=20")  # fmt: skip


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A cache with the answers of a run, and the run."""
    root = tmp_path_factory.mktemp("warm")
    return root / "cache", run(root / "out", f"cache={root / 'cache'}")


@pytest.fixture
def copied(warm: tuple[Path, Run], tmp_path: Path) -> Path:
    """That cache, for a test that changes it."""
    return Path(shutil.copytree(warm[0], tmp_path / "copied"))


def run(output_dir: Path, *settings: str) -> Run:
    before = {found.folder for found in runs(output_dir)}
    done = call(f"output_dir={output_dir}", *SETTINGS, *settings)
    assert done.code == 0, done.err
    (new,) = (found for found in runs(output_dir) if found.folder not in before)
    return new


def counts(found: Run) -> tuple[int, int]:
    """(hits, misses)."""
    return found.manifest["cache"]["hits"], found.manifest["cache"]["misses"]


def change(cache: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(cache / FILE)) as raw:
        assert raw.execute(statement, values).rowcount > 0
        raw.commit()


@pytest.fixture
def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cannot be loaded."""

    def load(self: LLM) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(LLM, "_load", load)


def test_without_cold_and_warm_are_the_same_bytes(warm: tuple[Path, Run], tmp_path: Path) -> None:
    cache, cold = warm
    without, hot = run(tmp_path / "without"), run(tmp_path / "hot", f"cache={cache}", "engine.max_num_seqs=1")
    assert counts(cold) == (0, ROWS) and counts(hot) == (ROWS, 0) and "cache" not in without.manifest
    for other in (cold, hot):
        assert other.digest == without.digest
        assert other.manifest["run_id"] == without.manifest["run_id"]
        assert other.manifest["identity"] == without.manifest["identity"]
        for name in ("records.parquet", "tokens.json", "digest.txt"):
            assert (other.folder / name).read_bytes() == (without.folder / name).read_bytes()
        assert other.results == without.results
    assert hot.manifest["counts"]["cached_requests"] == ROWS and hot.manifest["counts"]["resumed_requests"] == 0
    assert hot.manifest["counts"]["output_tokens"] == 0, "of the requests that ran"


@pytest.mark.usefixtures("unloadable")
def test_a_run_of_hits_loads_no_weights(warm: tuple[Path, Run], tmp_path: Path) -> None:
    assert run(tmp_path, f"cache={warm[0]}").digest == warm[1].digest


@pytest.mark.usefixtures("unloadable")
def test_that_check_can_fail(warm: tuple[Path, Run], tmp_path: Path) -> None:
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={warm[0]}", f"limit={ROWS + 1}")
    assert done.code == 1 and "weights were loaded" in done.err
    assert not (tmp_path / "out").exists(), "nothing is written before the weights are there"


def test_limits_orders_and_tasks_share_answers(copied: Path, tmp_path: Path) -> None:
    """Another limit, and the same rows under another task's name and in another order."""
    more = run(tmp_path / "more", f"cache={copied}", f"limit={ROWS + 2}")
    assert counts(more) == (ROWS, 2)
    rows = (files("evalengine.assets") / "tinymath" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    other = tmp_path / "rows.jsonl"
    other.write_text("\n".join(reversed(rows)) + "\n", encoding="utf-8")
    again = run(tmp_path / "again", f"cache={copied}", f"task.dataset.path={other}")
    assert counts(again) == (ROWS, 0)


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
        (("seed=3", "engine.max_model_len=600"), ROWS),  # nothing is drawn at temperature 0, and there is room
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_an_answer_depends_on(copied: Path, tmp_path: Path, settings: Sequence[str], hits: int) -> None:
    assert counts(run(tmp_path, f"cache={copied}", *settings)) == (hits, ROWS - hits)


def test_sampled_answers_are_kept_by_their_noise(copied: Path, tmp_path: Path) -> None:
    cold = run(tmp_path / "cold", f"cache={copied}", *SAMPLED)
    hot = run(tmp_path / "hot", f"cache={copied}", *SAMPLED)
    assert counts(hot) == (ROWS, 0) and hot.digest == cold.digest
    assert counts(run(tmp_path / "other", f"cache={copied}", *SAMPLED, "seed=1")) == (0, ROWS)


def test_alternatives_are_kept_bit_for_bit(copied: Path, tmp_path: Path) -> None:
    cold, hot = (run(tmp_path / name, f"cache={copied}", "logprobs=3") for name in ("cold", "hot"))
    assert counts(cold) == (0, ROWS) and counts(hot) == (ROWS, 0)
    assert (cold.folder / "records.parquet").read_bytes() == (hot.folder / "records.parquet").read_bytes()
    assert all(record.top_ids is not None and len(record.top_ids) for record in hot.records)


def test_scores_are_kept(tmp_path: Path) -> None:
    """Log-likelihoods with a shared context, through a task of lm-eval's form."""
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
    assert counts(cold) == (0, 6) and counts(hot) == (6, 0)
    assert without.digest == cold.digest == hot.digest
    assert (without.folder / "records.parquet").read_bytes() == (hot.folder / "records.parquet").read_bytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, under its name."""
    return Path(shutil.copytree(str(files("evalengine.assets") / "tinymath"), tmp_path / "tinymath"))


def test_a_copy_elsewhere_is_the_same_model(copied: Path, tmp_path: Path, model: Path) -> None:
    assert counts(run(tmp_path / "out", f"cache={copied}", f"model.path={model}", "model.name=tinymath")) == (ROWS, 0)


def other_weights(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = tensors[name] * 1.125
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def test_another_model_of_the_same_name_gets_none_of_its_answers(copied: Path, tmp_path: Path, model: Path) -> None:
    """lm-eval's cache gives model B the answers of model A (EleutherAI/lm-evaluation-harness issue 4063)."""
    other_weights(model)
    settings = (f"model.path={model}", "model.name=tinymath")
    cached, without = run(tmp_path / "cached", f"cache={copied}", *settings), run(tmp_path / "without", *settings)
    assert counts(cached) == (0, ROWS) and cached.digest == without.digest


@pytest.mark.parametrize("what", ["rope_theta", "eos", "repetition_penalty", "tokenizer"])
def test_the_same_weights_otherwise_understood_are_another_model(
    copied: Path, tmp_path: Path, model: Path, what: str
) -> None:
    if what == "rope_theta":
        edit(model / "config.json", rope_theta=20000.0)
    elif what == "eos":
        edit(model / "generation_config.json", eos_token_id=[0, 9])
    elif what == "repetition_penalty":
        edit(model / "generation_config.json", repetition_penalty=1.5)
    else:
        tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        edit(model / "tokenizer.json", added_tokens=[{**t, "rstrip": True} for t in tokenizer["added_tokens"]])
    settings = (f"model.path={model}", "model.name=tinymath")
    assert counts(run(tmp_path / "out", f"cache={copied}", *settings)) == (0, ROWS)


def test_another_contract_finds_nothing(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "CONTRACT_VERSION", contract.CONTRACT_VERSION + 1)
    assert counts(run(tmp_path / "out", f"cache={copied}")) == (0, ROWS)


def test_a_damaged_entry_is_named_computed_again_and_replaced(copied: Path, tmp_path: Path, warm: Any) -> None:
    change(copied, "UPDATE answers SET logprobs = zeroblob(length(logprobs)) WHERE rowid = 1")
    done = call(f"output_dir={tmp_path / 'first'}", *SETTINGS, f"cache={copied}")
    assert done.code == 0 and "damaged entries, whose requests are computed again: arithmetic, document" in done.err
    (first,) = runs(tmp_path / "first")
    assert first.manifest["cache"]["corrupt"] == 1 and counts(first) == (ROWS - 1, 1)
    assert "1 entries of the cache were damaged" in done.out
    second = run(tmp_path / "second", f"cache={copied}")
    assert counts(second) == (ROWS, 0) and first.digest == second.digest == warm[1].digest


def forge(cache: Path, number: int) -> None:
    """Another logprob in an entry that passes its own hash."""
    with Store.open(cache) as store:
        rows = store._connection.execute("SELECT key FROM answers ORDER BY rowid").fetchall()
        (key,) = rows[number]
        entry = store.get([key]).entries[key]
        logprobs = np.frombuffer(entry.logprobs, dtype="<f4").copy()
        logprobs[2] = np.nextafter(logprobs[2], np.float32(-9))
        facts = store.models()[0]["facts"]
        store.put(facts, [(key, type(entry)(**{**vars(entry), "logprobs": logprobs.tobytes()}))], replace=[key])


def test_an_audit_finds_a_forged_answer(copied: Path, tmp_path: Path, warm: tuple[Path, Run]) -> None:
    forge(copied, 1)
    unseen = run(tmp_path / "unseen", f"cache={copied}")
    assert counts(unseen) == (ROWS, 0) and unseen.digest != warm[1].digest, "its own hash does not show it"
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={copied}", "cache.audit=1")
    assert done.code == 1
    assert "cache.audit: arithmetic, document" in done.err and "the logprob of token 2 (id " in done.err
    assert " in the cache and " in done.err and " computed again" in done.err
    (failed,) = runs(tmp_path / "out")
    assert not (failed.folder / "journal.jsonl").read_bytes(), "no answer of a cache that lies is journaled"


@pytest.mark.parametrize(("share", "audited"), [("0.01", 1), ("1", ROWS)])
def test_a_true_cache_passes_its_audit(warm: Any, tmp_path: Path, share: str, audited: int) -> None:
    found = run(tmp_path, f"cache={warm[0]}", f"cache.audit={share}")
    assert found.manifest["cache"]["audited"] == audited and found.digest == warm[1].digest


def test_a_full_disk_ends_the_cache_and_not_the_run(
    tmp_path: Path, warm: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, *_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "put", full)
    monkeypatch.setattr(cached_engine, "BATCH", 1)
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={tmp_path / 'cache'}")
    (found,) = runs(tmp_path / "out")
    assert done.code == 0 and found.digest == warm[1].digest
    assert done.err.count("the run goes on without the cache") == 1
    assert found.manifest["cache"]["failed"] == "database or disk is full" and found.manifest["cache"]["kept"] == 0


def test_a_torn_file_ends_the_cache_and_not_the_run(copied: Path, tmp_path: Path, warm: tuple[Path, Run]) -> None:
    content = bytearray((copied / FILE).read_bytes())
    content[4096 * 3 :] = b"\xff" * len(content[4096 * 3 :])
    (copied / FILE).write_bytes(content)
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={copied}")
    (found,) = runs(tmp_path / "out")
    assert done.code == 0 and found.digest == warm[1].digest
    assert done.err.count("the run goes on without the cache") == 1


def test_an_interrupted_run_has_kept_what_it_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(10**6))
    real = LLM._step

    def step(self: LLM) -> Any:
        outputs = real(self)
        if next(steps) > 25:
            raise KeyboardInterrupt
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_step", step)
        call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={tmp_path / 'cache'}", "engine.max_num_seqs=2")
    hits, misses = counts(run(tmp_path / "again", f"cache={tmp_path / 'cache'}"))
    assert 0 < hits < ROWS and hits + misses == ROWS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("cache=c", "batch_invariant=false"), "fast numerics' bits depend on the batch"),
        (("cache=c", "batch_invariant=false", "numerics=fast"), "fast numerics' bits depend on the batch"),
        (("cache.audit=0.1",), "there is no cache to audit"),
        (("cache=c", "cache.audit=1.5"), "must lie in 0 ... 1"),
        (("cache=",), "cache: names no folder"),
        (("cache={file}",), "exists and is not a folder"),
    ],
)
def test_what_cannot_be_is_refused_at_start(tmp_path: Path, settings: Sequence[str], words: str) -> None:
    (tmp_path / "file").write_text("")
    given = [setting.replace("{file}", str(tmp_path / "file")) for setting in settings]
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, *given)
    assert done.code == 2 and words in done.err
    assert not (tmp_path / "out").exists() and not Path("c").exists()


def test_python_takes_a_cache(copied: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "limit": ROWS,
        "task": {"generation": {"max_gen_toks": 20}},
        "output_dir": str(tmp_path),
        "progress": False,
    }
    found = evalengine.evaluate("asset:tinymath", ["arithmetic"], cache=str(copied), **settings)
    assert found.manifest["cache"]["hits"] == ROWS
    both = {"path": str(copied), "audit": 0.5}
    found = evalengine.evaluate("asset:tinymath", ["arithmetic"], cache=both, **settings, resume="never")
    assert found.manifest["cache"]["audited"] == 2
    with LLM("asset:tinymath", device="cpu", max_num_seqs=2) as llm:
        found = evalengine.evaluate(llm, ["arithmetic"], cache=str(copied), **settings, resume="never")
    assert found.manifest["cache"]["hits"] == ROWS
    with pytest.raises(ConfigError, match="cache"):
        evalengine.evaluate("asset:tinymath", ["arithmetic"], cache=str(copied), batch_invariant=False, **settings)


@pytest.fixture
def lm_eval_model(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from evalengine.lm_eval_model.model import EvalEngineLM

    def make(**arguments: Any) -> Any:
        return EvalEngineLM(pretrained="asset:tinymath", device="cpu", cache=str(tmp_path / "cache"), **arguments)

    yield make


def test_the_model_of_lm_eval_takes_a_cache(
    lm_eval_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance

    def asked() -> list[Any]:
        pairs = [("2 + 2 =", " 4"), ("2 + 2 =", " 5"), ("3 + 2 =", " 5")]
        return [Instance("loglikelihood", {}, pair, 0, ("t", i, 1)) for i, pair in enumerate(pairs)]

    def texts() -> list[Any]:
        return [Instance("generate_until", {}, ("Question: 2 + 2?\nAnswer:", {"until": ["\n"]}), 0, ("g", 0, 1))]

    first = lm_eval_model()
    answers = first.loglikelihood(asked()), first.generate_until(texts())
    monkeypatch.setattr(LLM, "_load", lambda self: pytest.fail("weights were loaded"))
    again = lm_eval_model(output_dir=str(tmp_path / "records"), **{"cache.audit": 0})
    assert (again.loglikelihood(asked()), again.generate_until(texts())) == answers
    (folder,) = (tmp_path / "records").glob("*/records-*")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["cache"]["hits"], manifest["cache"]["misses"]) == (4, 0)
    with pytest.raises(ConfigError, match="fast numerics"):
        lm_eval_model(batch_invariant=False)
