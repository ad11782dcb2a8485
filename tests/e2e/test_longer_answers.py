"""A finished run goes on with a longer `max_gen_toks`: the bytes of a run that had it from the start, and less work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalengine import LLM, SamplingParams
from evalengine.engine.request import GenerateRequest
from evalengine.models.processors import LogitsProcessors
from evalengine.records.evidence import TOKENS
from evalengine.records.schema import Answer
from evalengine.records.tokens import read_tokens
from tests.e2e.command import Run, call, finished, runs

LIMIT = 4
USUAL = (f"limit={LIMIT}", "engine.device=cpu")
SHORT, LONG = ("task.generation.max_gen_toks=9", "task.generation.max_gen_toks=40")
LONGER = "task.generation.max_gen_toks=20"  # For answers that need not end.


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(tmp_path_factory.mktemp("short"), USUAL[0], SHORT)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(tmp_path_factory.mktemp("long"), USUAL[0], LONG)


def go_on(short: Run, folder: Path, *own: str) -> Run:
    done = call(*USUAL, f"output_dir={folder}", f"resume={short.folder}", *own)
    assert done.code == 0, done.err
    assert "interrupted" not in done.err
    (run,) = runs(folder)
    return run


def test_cut_answers_go_on_to_the_bytes_of_a_longer_run(short: Run, long: Run, tmp_path: Path) -> None:
    cut = [record for record in short.records if record.finish_reason == "length"]
    assert cut and any(record.finish_reason == "stop" for record in long.records)
    run = go_on(short, tmp_path, LONG)
    assert run.digest == long.digest and run.digest != short.digest
    assert [record.text for record in run.records] == [record.text for record in long.records]
    assert [record.is_greedy for record in run.records] == [record.is_greedy for record in long.records]
    assert run.results == long.results
    spared = sum(len(record.output_ids) for record in short.records)
    generated = [one.manifest["engine"]["stats"]["num_generated_tokens"] for one in (run, long)]
    assert generated[0] == generated[1] - spared
    assert run.manifest["identity"] == long.manifest["identity"]
    assert call("check", str(run.folder)).code == 0


def test_drawn_answers_and_processors_go_on_alike(tmp_path: Path) -> None:
    drawn = ("task.generation.temperature=1.0", "task.repeats=2")
    short = finished(tmp_path / "short", USUAL[0], *drawn, SHORT)
    long = finished(tmp_path / "long", USUAL[0], *drawn, LONGER)
    assert go_on(short, tmp_path / "on", *drawn, LONGER, "engine.max_num_seqs=2").digest == long.digest


def test_a_thinking_goes_on(tmp_path: Path) -> None:
    """Some thinkings are cut and some answers behind them; what is thinking is told anew from all tokens."""
    thinking = "model.think_end_token=' has'"
    short = finished(tmp_path / "short", USUAL[0], thinking, SHORT)
    long = finished(tmp_path / "long", USUAL[0], thinking, LONGER)
    assert {record.thinking_truncated for record in short.records} == {True, False}
    run = go_on(short, tmp_path / "on", thinking, LONGER)
    assert run.digest == long.digest and run.results == long.results
    said = [[(one.text, one.thinking, one.thinking_tokens, one.thinking_truncated) for one in each.records]
            for each in (run, long)]  # fmt: skip
    assert said[0] == said[1]
    scored = go_on(short, tmp_path / "scored", thinking, LONGER, "score_unfinished_thinking=true")
    assert scored.digest == long.digest, "how unfinished thinking is scored changes no answer"


def test_a_stop_string_over_the_limit_of_the_shorter_run(long: Run, tmp_path: Path) -> None:
    """Its first part is the last token that the shorter run had room for."""
    pieces = read_tokens(long.folder / TOKENS)
    first, second = (pieces[token].decode() for token in long.records[0].output_ids[8:10])
    assert first and second
    stop = f"task.generation.until={json.dumps([first + second])}"
    short, whole = (finished(tmp_path / name, USUAL[0], stop, length) for name, length in (("s", SHORT), ("l", LONGER)))
    assert short.records[0].finish_reason == "length" and whole.records[0].finish_reason == "stop"
    assert len(whole.records[0].output_ids) == 10 and not whole.records[0].text.endswith(first)
    assert go_on(short, tmp_path / "on", stop, LONGER).digest == whole.digest


def test_what_is_no_shorter_run_is_said(short: Run, long: Run, tmp_path: Path) -> None:
    for run, own, said in (
        (long, [SHORT], "its answers are longer than this run's may be"),
        (short, [LONG, "seed=3"], "it is another run: seed"),
        (short, [LONG, "batch_invariant=false"], "numerics=fast"),
        (short, [LONG, "logprobs=1"], "alternatives are not continued"),
    ):
        done = call(*USUAL, f"output_dir={tmp_path}/no", f"resume={run.folder}", *own)
        assert done.code == 2 and said in done.err, done.err
    assert not (tmp_path / "no").exists()


def test_an_edited_run_is_not_continued(short: Run, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "edited"
    shutil.copytree(short.folder, copy)
    (file,) = copy.glob("samples_*.jsonl")
    file.write_text(file.read_text() + json.dumps({}) + "\n")
    done = call(*USUAL, f"output_dir={tmp_path}/no", f"resume={copy}", LONG)
    assert done.code == 2 and "edited or damaged" in done.err


@pytest.mark.parametrize("length", [1, 5, 11])
def test_a_stop_string_and_a_penalty_over_the_seam(length: int) -> None:
    """Cut amid a stop string, and with processors that count the answer's own tokens."""
    question = "Question: Arlo collects 45 flowers. Diego has 32 fewer. How many do they have together?\nAnswer:"
    with LLM("asset:tinymath", device="cpu", num_kv_blocks=64) as llm:
        ids = llm.tokenizer.encode(question)
        rules = LogitsProcessors(repetition_penalty=1.1, min_new_tokens=13)
        params = SamplingParams(max_tokens=24, temperature=0.8, processors=rules)
        (free,) = llm.run([GenerateRequest(0, ids, params)])
        stop = llm.tokenizer.decode(free.token_ids[length - 1 : length + 1])  # of two tokens, one on each side
        params = SamplingParams(max_tokens=24, temperature=0.8, processors=rules, stop=(stop,))
        (whole,) = llm.run([GenerateRequest(0, ids, params)])
        known = Answer(free.token_ids[:length], free.logprobs[:length], "length", "", False)
        if len(whole.token_ids) <= length:
            pytest.skip("this stop string occurs earlier")
        (output,) = llm.run([GenerateRequest(0, ids, params, partial=known)])
    assert (output.token_ids, output.text, output.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)
    assert output.logprobs.tobytes() == whole.logprobs.tobytes()
