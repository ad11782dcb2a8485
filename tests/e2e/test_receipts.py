"""`prove` and `check`: what a receipt says is computed again, and whatever is changed in it is found and named."""

from __future__ import annotations

import base64
import copy
import json
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import evalengine
from evalengine import version
from evalengine.engine.llm import LLM
from evalengine.receipts.receipt import FORMAT, Receipt, read_receipt
from evalengine.records.digest import leaf_hash
from tests.e2e.command import Outcome, Run, call, over, proved, runs

MODEL = "asset:tinymath"
SETTINGS = ("limit=5", "engine.device=cpu", "progress=false", "resume=never", "task.generation.max_gen_toks=6")
CHOICES = """\
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: choices
doc_to_target: gold
"""


def run(output_dir: Path, *words: str) -> Run:
    done = call(f"output_dir={output_dir}", *over(SETTINGS, *words))
    assert done.code == 0, done.err
    return runs(output_dir)[-1]


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("greedy"))


@pytest.fixture(scope="module")
def receipt(greedy: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return proved(greedy, 3, tmp_path_factory.mktemp("receipt"))


@pytest.fixture(scope="module")
def content(receipt: Path) -> dict[str, Any]:
    receipt_fields: dict[str, Any] = json.loads(receipt.read_text(encoding="utf-8"))
    return {name: value for name, value in receipt_fields.items() if name not in ("sha256", "format", "version")}


def check(file: Path, *words: str, model: str = MODEL) -> Outcome:
    return call("check", str(file), "--model", model, *words)


def resealed(folder: Path, content: dict[str, Any]) -> Path:
    """A forged receipt, whose own hash is right."""
    file = folder / "forged.json"
    file.write_text(FORMAT.seal(content), encoding="utf-8")
    return file


def as_a_run_of_one(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content as a receipt from a run of this item alone: its digest is the item's leaf."""
    alone: dict[str, Any] = {**content, "leaf": {"index": 0, "count": 1, "path": []}}
    parsed = read_receipt(resealed(folder, alone))
    return {**alone, "digest": leaf_hash(parsed.record).hex()}


def test_a_receipt_agrees(greedy: Run, receipt: Path) -> None:
    done = check(receipt, "--digest", greedy.digest)
    assert done.code == 0, done.out + done.err
    assert "arithmetic/3/0/0" in done.out and "every bit agrees" in done.out
    assert "generated greedily: the model wrote the output tokens" in done.out
    assert done.out.endswith(f"digest: {greedy.digest} (leaf 3, by 3 hashes)\nverdict: AGREES\n")


def test_what_it_holds(greedy: Run, receipt: Path) -> None:
    """A receipt holds the item's record, its path to the run's digest, and the hash of the weights."""
    parsed = read_receipt(receipt)
    (record,) = (candidate for candidate in greedy.records if candidate.doc_id == 3)
    assert parsed.digest == greedy.digest and parsed.leads_to_digest()
    assert leaf_hash(parsed.record) == leaf_hash(record)
    assert parsed.computed_by["weights"] == greedy.manifest["model"]["weights_sha256"]
    assert receipt.stat().st_size < 10_000


def test_proving_loads_no_weights(greedy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "_load", lambda self: pytest.fail("weights were loaded"))
    assert call("prove", str(greedy.folder), "--item", "arithmetic/0", "-o", str(tmp_path / "r.json")).code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("task.generation.temperature=0.9", "task.generation.top_k=30", "task.repeats=2", "seed=4"),
        ("engine.dtype=float32", "logprobs=2"),
        ("apply_chat_template=true",),
    ],
)
def test_other_runs_agree(tmp_path: Path, words: Sequence[str]) -> None:
    proved_run = run(tmp_path / "out", *words)
    last_key = max(record.key for record in proved_run.records)
    file = tmp_path / "r.json"
    done = call("prove", str(proved_run.folder), "--item", "/".join(map(str, last_key)), "-o", str(file))
    assert done.code == 0, done.err
    assert check(file).code == 0
    again = call("check", str(proved_run.folder), "--sample", "3")
    assert again.code == 0 and "3 of " in again.out and again.out.splitlines()[-1] == "verdict: AGREES"


def test_scores_agree(tmp_path: Path) -> None:
    rows = [{"q": f"{i} + 2 =", "choices": [f"{i + 2}", f"{i + 3} or more"], "gold": 0} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(CHOICES.format(rows=tmp_path / "rows.jsonl"), encoding="utf-8")
    scored_run = run(tmp_path / "out", f"task={tmp_path / 'mine.yaml'}", "task.generation.max_gen_toks=null")
    assert call("prove", str(scored_run.folder), "--item", "mine/2/1", "-o", str(tmp_path / "r.json")).code == 0
    assert check(tmp_path / "r.json").code == 0
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[::-1])) + "\n", encoding="utf-8")
    assert "scored: the output tokens were given" in check(tmp_path / "r.json").out
    done = call("prove", str(scored_run.folder), "--item", "mine/2/1", "-o", str(tmp_path / "s.json"))
    assert done.code == 2 and "are no longer the run's" in done.err and not (tmp_path / "s.json").exists()


# -- A changed receipt is refused, or its difference is named --------------------------------------------------------


def test_an_edited_file_is_refused(receipt: Path, tmp_path: Path) -> None:
    text = receipt.read_text(encoding="utf-8")
    (tmp_path / "r.json").write_text(text.replace('"is_greedy": true', '"is_greedy": false'), encoding="utf-8")
    done = check(tmp_path / "r.json")
    assert done.code == 2 and "it was edited or damaged" in done.err


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_is_found(receipt: Path, tmp_path: Path, data: st.DataObject) -> None:
    """The hash inside the file covers all of it: only a change of white space may be read."""
    damaged = bytearray(receipt.read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != damaged[place]))
    (tmp_path / "r.json").write_bytes(bytes(damaged))
    try:
        parsed: Receipt | None = read_receipt(tmp_path / "r.json")
    except evalengine.errors.ConfigError:
        return
    assert parsed is not None and vars(parsed)["digest"] == read_receipt(receipt).digest
    assert json.loads(bytes(damaged)) == json.loads(receipt.read_bytes()), "what is read is what was written"


LEAF_FIELDS = ("task", "doc_id", "request_index", "repeat", "prompt_ids", "output_ids", "logprobs", "digest", "path",
               "index")  # fmt: skip


def changed(content: dict[str, Any], name: str, draw: Any) -> dict[str, Any]:
    """A copy of the content whose field `name` has another value of its kind, drawn by `draw`."""
    forged = copy.deepcopy(content)
    if name == "task":
        forged["item"]["task"] += draw(st.text(min_size=1, max_size=3, alphabet="abc"))
    elif name in ("doc_id", "request_index", "repeat"):
        forged["item"][name] += draw(st.integers(1, 1 << 40))
    elif name in ("prompt_ids", "output_ids"):
        place = draw(st.integers(0, len(forged[name]) - 1))
        forged[name][place] = (forged[name][place] + draw(st.integers(1, 1000))) % 1024
    elif name == "logprobs":
        bits = np.frombuffer(base64.b64decode(forged[name]), dtype="<u4").copy()
        bits[draw(st.integers(0, len(bits) - 1))] ^= 1 << draw(st.integers(0, 31))
        forged[name] = base64.b64encode(bits.tobytes()).decode()
    elif name == "index":
        forged["leaf"]["index"] += draw(st.integers(1, 9))
    elif name == "path":
        place = draw(st.integers(0, len(forged["leaf"]["path"]) - 1))
        forged["leaf"]["path"][place] = draw(st.text("0123456789abcdef", min_size=64, max_size=64))
    else:
        forged["digest"] = draw(st.text("0123456789abcdef", min_size=64, max_size=64))
    return forged


@pytest.mark.parametrize("name", LEAF_FIELDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_forged_field_does_not_lead_to_the_digest(
    content: dict[str, Any], tmp_path: Path, name: str, data: st.DataObject
) -> None:
    done = check(resealed(tmp_path, changed(content, name, data.draw)))
    assert done.code == 1 and "do not lead to the digest" in done.out, done.out + done.err
    assert done.out.splitlines()[-1] == "verdict: DIFFERS"


def test_a_forged_answer_with_a_digest_of_its_own_is_computed_again(content: dict[str, Any], tmp_path: Path) -> None:
    """A whole run made up around a forged answer is found by the arithmetic, or by a digest known before."""
    logprobs = np.frombuffer(base64.b64decode(content["logprobs"]), dtype="<u4").copy()
    logprobs[2] ^= 1
    forged = {**content, "logprobs": base64.b64encode(logprobs.tobytes()).decode()}
    done = check(resealed(tmp_path, as_a_run_of_one(forged, tmp_path)))
    assert done.code == 1 and "the logprob of token 2 (id " in done.out and "in the receipt and" in done.out
    forged = {**content, "output_ids": [*content["output_ids"][:4], 7, *content["output_ids"][5:]]}
    done = check(resealed(tmp_path, as_a_run_of_one(forged, tmp_path)))
    assert done.code == 1 and "token 4 is 7 in the receipt and" in done.out
    genuine = resealed(tmp_path, as_a_run_of_one(content, tmp_path))
    assert check(genuine).code == 0, "a true answer of another run"
    done = check(genuine, "--digest", content["digest"])
    assert done.code == 1 and "of a run with the digest" in done.out


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("text", "another answer", "text is 'another answer' in the receipt and"),
        ("finish_reason", "eos", "finish_reason is 'eos' in the receipt and"),
        ("is_greedy", False, "is_greedy is False in the receipt and True computed again"),
    ],
)
def test_what_is_beside_the_leaf_is_compared(
    content: dict[str, Any], tmp_path: Path, name: str, value: Any, words: str
) -> None:
    """Fields that the digest's leaf does not cover are compared with those computed again."""
    done = check(resealed(tmp_path, {**content, name: value}))
    assert done.code == 1 and words in done.out, done.out + done.err


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("max_tokens", 5, 1, "output_ids is"),
        ("temperature", 9.0, 1, "token "),
        ("max_tokens", 10**9, 2, "ask for the receipt again"),
        ("max_tokens", -1, 2, "max_tokens=-1"),
        ("best_of", 3, 2, "best_of"),
        ("n", 2, 2, "n=2"),
    ],
)
def test_what_was_asked_decides_the_answer(
    content: dict[str, Any], tmp_path: Path, name: str, value: Any, code: int, words: str
) -> None:
    done = check(resealed(tmp_path, {**content, "asked": {**content["asked"], name: value}}))
    assert done.code == code and words in done.out + done.err, done.out + done.err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("contract_version", 99, "computed by contract 99, and this evalengine computes by contract"),
        ("weights", "0" * 64, "another model than that of"),
        ("numerics", "fast", "computed in fast numerics"),
        ("numerics", "native", "this machine has no usable GPU"),
        ("dtype", "float64x", "engine.dtype"),
        ("model_spec", {"processors": {}}, "the receipt's weights, otherwise configured: model_spec."),
        ("tokenizer", {"sha256": "00"}, "another tokenizer than that of"),
    ],
)
def test_what_computed_it_must_be_at_hand(
    content: dict[str, Any], tmp_path: Path, name: str, value: Any, words: str
) -> None:
    """A receipt is refused if another contract, model, numerics, dtype or tokenizer computed it."""
    if value == "native" and __import__("torch").cuda.is_available():
        pytest.skip("for machines without a GPU")
    by = {**content["computed_by"], name: value}
    if value == "native":
        by["gpu_architecture"] = "sm_90"
        words = f"on a GPU of architecture sm_90, whose bits only such a GPU gives; {words}"
    done = check(resealed(tmp_path, {**content, "computed_by": by}))
    assert done.code == 2 and words in done.err and "Traceback" not in done.err, done.out + done.err


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_another_dtype_gives_other_bits(content: dict[str, Any], tmp_path: Path, dtype: str) -> None:
    """bfloat16 weights are float32 values, too, so against float32 only the rounding of the KV pages shows."""
    done = check(resealed(tmp_path, {**content, "computed_by": {**content["computed_by"], "dtype": dtype}}))
    assert done.code == 1 and "in the receipt and" in done.out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(str(files("evalengine.assets") / "tinymath"), tmp_path / "tinymath"))


def test_a_copy_of_the_model_agrees_and_another_is_named(receipt: Path, model: Path) -> None:
    assert check(receipt, model=str(model)).code == 0
    tokenizer = model / "tokenizer.json"
    edited = json.loads(tokenizer.read_text(encoding="utf-8"))
    edited["added_tokens"][0]["rstrip"] = True
    tokenizer.write_text(json.dumps(edited), encoding="utf-8")
    done = check(receipt, model=str(model))
    assert done.code == 2 and "another tokenizer than that of" in done.err
    whole = bytearray((model / "model.safetensors").read_bytes())
    whole[-1] ^= 1
    (model / "model.safetensors").write_bytes(whole)
    done = check(receipt, model=str(model))
    assert done.code == 2 and "another model than that of" in done.err


def test_another_contract_is_named(receipt: Path, greedy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "CONTRACT_VERSION", version.CONTRACT_VERSION + 1)
    for done in (check(receipt), call("check", str(greedy.folder))):
        assert done.code == 2 and "check it with an evalengine of that contract" in done.err


def test_a_run_that_says_what_was_not_computed_differs(greedy: Run, tmp_path: Path) -> None:
    """One made-up logprob in a run is found, though every hash of the run is right."""
    from tests.e2e.test_cache_damage import another_logprob, forge

    first = run(tmp_path / "first", f"cache={tmp_path / 'cache'}")
    assert first.digest == greedy.digest
    forge(tmp_path / "cache", 2, another_logprob)
    forged = run(tmp_path / "forged", f"cache={tmp_path / 'cache'}")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").write_text("no folder")  # The run's settings name this cache, and `check` never reads it.
    done = call("check", str(forged.folder), "--sample", "5")
    assert done.code == 1 and "the logprob of token 2" in done.out and "1 of 5 items" in done.out
    assert done.out.splitlines()[-1] == "verdict: DIFFERS"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prove", "{run}", "--item", "77", "-o", "{tmp}/r.json"), "has no such request"),
        (("prove", "{run}", "--item", "3"), "-o"),
        (("prove", "{run}", "--item", "3", "-o", "{tmp}"), "a folder; name a file in it"),
        (("check", "{receipt}"), "--model names the model"),
        (("check", "{run}", "--model", MODEL), "are for a receipt"),
        (("check", "{run}", "--sample", "0"), "'--sample': Input should be greater than or equal to 1"),
        (("check", "{tmp}/nothing"), "no such file or folder"),
        (("check", "{run}/digest.txt", "--model", MODEL), "not JSON"),
    ],
)
def test_bad_usage(greedy: Run, receipt: Path, tmp_path: Path, words: Sequence[str], message: str) -> None:
    names = {"run": greedy.folder, "receipt": receipt, "tmp": tmp_path}
    done = call(*(word.format(**names) for word in words))
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done.err


def test_fast_runs_cannot_be_proved(tmp_path: Path) -> None:
    fast = run(tmp_path / "out", "batch_invariant=false")
    for words in (("prove", str(fast.folder), "--item", "0", "-o", str(tmp_path / "r")), ("check", str(fast.folder))):
        done = call(*words)
        assert done.code == 2 and "whose bits depend on the batch" in done.err
