"""The audit of a vendor: its noise with intervals, how it is asked, that no key is left, and what is not proved."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
import signal
import time
import urllib.error
from email.message import Message
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse

from evalengine.config.schema import EndpointConfig
from evalengine.integrations.endpoint.http import LONGEST_RETRY_AFTER, Client, _wanted_wait
from evalengine.integrations.endpoint.run import between
from evalengine.report.read.load import load_run
from evalengine.report.stats.metric_interval import cut_of
from tests.e2e.command import call, finish, start
from tests.endpoint.asking import ask, only, results, write_sums
from tests.endpoint.fake import Fake
from tests.serve.running import serving

SECRET = "sk-test-0123456789abcdefghij"


@pytest.mark.parametrize(("documents", "asks"), [(50, 2), (200, 2), (100, 3), (60, 5)])
def test_the_interval_covers_the_true_chance_that_two_asks_differ(documents: int, asks: int) -> None:
    """Vendors whose documents flip by chances of their own, most of them hardly ever: in 95 of 100 audits the interval
    holds the chance over all documents like these, less what 800 audits leave to chance (three standard errors)."""
    rng, a, b, draws = np.random.default_rng(7), 0.3, 3.0, 800
    truth = 2 * (a / (a + b) - a * (a + 1) / ((a + b) * (a + b + 1)))  # E 2p(1-p), p of Beta(a, b)
    held = 0
    for _ in range(draws):
        chances = rng.beta(a, b, (documents, 1))
        low, high = between((rng.random((documents, asks)) < chances).tolist())["between_interval"]
        held += low <= truth <= high
    assert 0.95 - 3 * (0.05 * 0.95 / draws) ** 0.5 <= held / draws < 1


def test_a_vendor_of_a_known_rate(tmp_path: Path) -> None:
    """Each answer is another one with a chance of 15 %: two identical requests differ in 2 * 0.15 * 0.85 of the
    documents."""
    with serving(Fake(flips=0.15, seconds=0).app) as url:
        done = ask(url, write_sums(tmp_path, 80), "endpoint.repeats=3")
    assert done.code == 0, done.err
    found = results(only(tmp_path / "results"))["endpoint"]["noise"]
    (metric,) = found["metrics"]
    for one in (found["texts"], metric):
        low, high = one["between_interval"]
        assert low < 2 * 0.15 * 0.85 < high and high - low < 0.25
        low, high = one["interval"]
        assert low < 1 - 0.85**3 - 0.15**3 < high
    assert [key[1] for key in found["texts"]["requests_changed"]] == metric["documents_changed"]
    assert "two identical requests differ in" in done.out


def test_no_key_is_left_anywhere(tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A vendor that repeats the key in its errors, its answers and its fingerprint."""
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\n")
    with serving(Fake(key="another", tells=SECRET).app) as url:
        refused = ask(url, sums)
    assert refused.code == 1 and "a wrong key (the key)" in refused.err
    with serving(Fake(key=SECRET, tells=SECRET, fail_first=1).app) as url:
        done = ask(url, sums, "endpoint.repeats=2")
        report = call("report", str(only_finished(tmp_path / "results")), "--samples", str(tmp_path / "samples.csv"))
    assert done.code == 0 and report.code == 0, done.err + report.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"answers.jsonl", "report.html", "config.yaml", "index.html", "samples.csv"} <= {path.name for path in files}
    for text in (refused.out, refused.err, done.out, done.err, *(path.read_text(errors="replace") for path in files)):
        assert SECRET not in text
    assert "(the key)" in (only_finished(tmp_path / "results") / "answers.jsonl").read_text()


def only_finished(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if (path / "report.html").exists()]
    return found


def test_a_key_in_the_address_is_refused_unsaid(tmp_path: Path, sums: list[str]) -> None:
    for address in (f"https://user:{SECRET}@host/v1", f"https://host/v1?api_key={SECRET}"):
        done = call(f'model.api="{address}"', *sums)
        assert done.code == 2 and "belongs into the address" in done.err and SECRET not in done.err
    assert not (tmp_path / "results").exists()


def test_no_key_follows_a_redirect(tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALENGINE_API_KEY", SECRET)
    elsewhere, here = Fake(), FastAPI()
    with serving(elsewhere.app) as other:

        async def leave(request: Request) -> RedirectResponse:
            return RedirectResponse(f"{other}{request.url.path}", 302)

        here.add_api_route("/v1/completions", leave, methods=["POST"])
        with serving(here) as url:
            done = ask(url, sums)
    assert done.code == 1 and "status 302" in done.err and not elsewhere.bodies


def test_waits_are_those_that_a_vendor_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(value: str) -> float:
        headers = Message()
        headers["retry-after"] = value
        return _wanted_wait(urllib.error.HTTPError("", 429, "", headers, None), 3.5)

    assert (asked("7"), asked("0"), asked("-3")) == (7, 0, 0)
    assert asked("100000") == LONGEST_RETRY_AFTER and asked("90") == 90, "not before it was allowed"
    assert 25 < asked(formatdate(time.time() + 30, usegmt=True)) <= 30
    assert [asked(value) for value in ("", "soon", "nan", "Tue, nonsense")] == [3.5] * 4
    with serving(Fake(fail_first=2).app) as url:
        client, waits = Client(f"{url}/v1/completions", EndpointConfig()), []
        monkeypatch.setattr(client._stop, "wait", lambda seconds: waits.append(seconds))
        (reply,) = client.ask([{"prompt": "What is 3 + 4 ?"}])
    assert reply.value is not None and reply.attempts == 3 and waits == [0, 0]


def test_a_killed_run_asks_what_is_missing(tmp_path: Path) -> None:
    sums = write_sums(tmp_path, 40)
    fake = Fake()
    fake.hold_after = 6
    with serving(fake.app) as url:
        process = start(f"model.api={url}/v1", *sums, "endpoint.concurrency=2")
        try:
            while not list(tmp_path.glob("results/*/answers.jsonl")) or len(kept(tmp_path)) < 5:
                assert process.poll() is None, finish(process).err
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            finish(process)
        fake.hold_after = None
        before = kept(tmp_path)
        assert 5 <= len(before) < 40
        again = ask(url, sums, "endpoint.concurrency=2")
    assert again.code == 0, again.err
    asked = [fake.asked[f"What is {n} + {n + 1 + n % 2} ?"] for n in range(40)]
    assert all(asked[number] == 1 for number in before) and min(asked) == 1
    assert sum(asked) <= 40 + 2, "the two that were under way are asked again"
    assert fake.most_at_once <= 2
    assert load_run(only(tmp_path / "results")).results["sums", "exact_match", "none"][0] == 1.0


def kept(folder: Path) -> list[int]:
    (file,) = folder.glob("results/*/answers.jsonl")
    return [json.loads(line)["number"] for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_what_is_not_proved_and_what_was_cut_is_said_everywhere(tmp_path: Path, sums: list[str]) -> None:
    with serving(Fake(cut=6).app) as url:  # of the sums 1, 4, 5, 8, ...: three documents
        done = ask(url, sums, "endpoint.repeats=2")
    cut = "37.5 % cut at the limit: 1.0000 on these, 1.0000 on the finished ones"
    assert done.code == 0 and cut in done.out and "16 answers of" in done.out, done.out + done.err
    assert "6 cut at the limit" in done.out, "of both asks"
    folder = only(tmp_path / "results")
    found = cut_of(load_run(folder), ("sums", "exact_match", "none"))
    assert found is not None and found.words == cut
    page = (folder / "report.html").read_text()
    for words in ("Answers of an endpoint", "No one can compute an answer again", "2 identical requests", cut):
        assert words in page
    compared = call("compare", str(folder), str(folder), "--level", "answers")
    assert "A is a folder of an endpoint's answers: it holds texts" in compared.out
    assert f"A {cut}; B {cut}" in compared.out
    gated = call("gate", str(folder), str(folder), "--policy", "accuracy")
    assert "an endpoint's answers, without logprob bits" in gated.out and f"baseline {cut}" in gated.out
    table = call("report", str(folder), "--table", "md").out
    assert "| theirs |" in table and "theirs: an endpoint, no digest, 8 requests" in table and cut in table
    checked = call("check", str(folder))
    assert checked.code == 2 and "a folder of an endpoint's answers, of which nothing can be proved" in checked.err
