"""`model.api=URL`: our tasks through an endpoint; ours, and a fake one that is noisy, fails and refuses."""

from __future__ import annotations

import tests.serve.needs  # noqa: F401  # first

# isort: split

import json
from pathlib import Path

import pytest

from evalengine.report.read.load import load_run
from tests.e2e.command import call, installed
from tests.endpoint.asking import COUNT, ask, only, results
from tests.endpoint.fake import Fake
from tests.serve.running import running, serving


@pytest.mark.parametrize("chat", [False, True])
def test_a_task_is_scored_and_read_as_a_run(tmp_path: Path, sums: list[str], chat: bool) -> None:
    fake = Fake()
    with serving(fake.app) as url:
        done = ask(url, sums, f"apply_chat_template={str(chat).lower()}", "endpoint.body={user: me}")
    assert done.code == 0, done.err
    assert "not proved: an endpoint shows neither tokens nor bits" in done.out and "digest:" not in done.out
    folder = only(tmp_path / "results")
    run = load_run(folder)
    assert run.results["sums", "exact_match", "none"][0] == 1.0 and len(run.items) == COUNT
    assert (folder / "report.html").exists() and not (folder / "identity.json").exists()
    assert 1 < fake.most_at_once <= 16
    (body,) = [body for body in fake.bodies if "What is 3" in json.dumps(body)]
    said = {"messages": [{"role": "user", "content": "What is 3 + 5 ?"}]} if chat else {"prompt": "What is 3 + 5 ?"}
    assert body == {"model": "theirs", **said, "max_tokens": 8, "temperature": 0.0, "seed": 0, "user": "me",
                    "stop": ["\n\n"]}  # fmt: skip


def test_a_package_adds_a_model_by_an_entry_point(
    tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import json, re
failed = []
def send(url, body, seconds):
    if not failed:
        failed.append(url)
        raise OSError("busy")
    text = str(sum(map(int, re.findall("[0-9]+", json.loads(body)["prompt"]))))
    return json.dumps({"choices": [{"text": text, "finish_reason": "stop"}], "model": url}).encode()
"""
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "evalengine.models", "adder", "send", source))
    done = call("model.api=adder://here", *sums)
    assert done.code == 0, done.err
    run = only(tmp_path / "results")
    assert load_run(run).results["sums", "exact_match", "none"][0] == 1.0
    facts = results(run)["endpoint"]
    assert facts["models"] == {"adder://here/completions": COUNT} and facts["retried"] == 1
    done = call("model.api=subtractor://here", *sums)
    assert done.code == 2 and "must be an address as https://HOST/v1" in done.err
    monkeypatch.syspath_prepend(installed(tmp_path / "site", "evalengine.models", "broken", "send", "import missing_"))
    done = call("model.api=broken://here", *sums)
    assert done.code == 2 and "its package cannot be imported (No module named 'missing_')" in done.err


def test_failures_that_pass_are_asked_again(tmp_path: Path, sums: list[str]) -> None:
    fake = Fake(fail_first=2)
    with serving(fake.app) as url:
        done = ask(url, sums)
    assert done.code == 0, done.err
    facts = results(only(tmp_path / "results"))["endpoint"]
    assert facts["retried"] == COUNT and facts["system_fingerprints"] == {"fp_1": COUNT}
    assert set(fake.asked.values()) == {3}


def test_identical_asks_show_the_endpoints_noise(tmp_path: Path, sums: list[str]) -> None:
    """Half of the documents, the odd sums, have another answer at every third ask."""
    fake = Fake(wrong_every=3)
    with serving(fake.app) as url:
        done = ask(url, sums, "endpoint.repeats=3")
    assert done.code == 0, done.err
    found = results(only(tmp_path / "results"))["endpoint"]["noise"]
    (metric,) = found["metrics"]
    assert found["texts"]["changed"] == metric["changed"] == COUNT // 2
    assert metric["documents_changed"] == [0, 2, 4, 6]
    assert metric["between_two_asks"] == pytest.approx(1 / 3)  # two of the three pairs differ, in half of the documents
    assert sorted(metric["values"]) == [0.5, 1.0, 1.0]
    assert metric["interval"][0] < 0.5 < metric["interval"][1]
    assert f"3 identical requests: {COUNT // 2} of {COUNT} texts changed" in done.out


def test_our_own_server_has_no_noise_and_the_offline_runs_answers(tmp_path: Path) -> None:
    usual = ["task=arithmetic", "limit=4", "progress=false", "task.generation.max_gen_toks=24"]
    with running() as server:
        done = ask(server.url, usual, f"output_dir={tmp_path}/api", "endpoint.repeats=2")
    assert done.code == 0, done.err
    assert "2 identical requests: 0 of 4 texts changed" in done.out
    assert call(*usual, f"output_dir={tmp_path}/ours", "engine.device=cpu").code == 0
    theirs, ours = (load_run(only(tmp_path / name)) for name in ("api", "ours"))
    assert [item.text for item in theirs.items.values()] == [item.text for item in ours.items.values()]
    assert theirs.scores == ours.scores


def test_a_run_that_failed_asks_only_what_is_missing(tmp_path: Path, sums: list[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text().replace("What is 5", "unanswerable 5"))
    fake = Fake()
    with serving(fake.app) as url:
        failed = ask(url, sums)
        assert failed.code == 1 and "1 of 8 requests failed" in failed.err and "this one never" in failed.err
        folder = only(tmp_path / "results")
        with open(folder / "answers.jsonl", "ab") as file:
            file.write(b'{"number": 5, "te')  # a kill amid a line
        before = sum(fake.asked.values())
        again = ask(url, sums)
        assert again.code == 1 and sum(fake.asked.values()) == before + 1, "what is kept is not asked again"
    assert len((folder / "answers.jsonl").read_text().splitlines()) == COUNT - 1


def test_what_every_request_would_be_refused_for_ends_the_run(tmp_path: Path, sums: list[str],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    fake = Fake(key="right")
    with serving(fake.app) as url:
        monkeypatch.setenv("EVALENGINE_API_KEY", "mistyped")
        refused = ask(url, sums, "endpoint.concurrency=1")
        assert refused.code == 1 and "a wrong key" in refused.err and "EVALENGINE_API_KEY" in refused.err
        monkeypatch.setenv("EVALENGINE_API_KEY", "right")
        done = ask(url, sums)
    assert done.code == 0, done.err
    left = "".join(path.read_text() for path in only(tmp_path / "results").iterdir() if path.suffix != ".html")
    assert "right" not in left, "no file holds the key"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["task=hellaswag"], "an endpoint only writes"),
        (["task=arithmetic", "logprobs=2"], "logprobs: of no use with model.api"),
        (["task=arithmetic", "endpoint.repeats=0"], "endpoint.repeats"),
        (["task=arithmetic", "model.api=ftp://x"], "must be an address as https://HOST/v1"),
    ],
)
def test_what_an_endpoint_cannot_do_is_said_before(tmp_path: Path, own: list[str], said: str, data_dir: Path) -> None:
    api = [] if any(word.startswith("model.api") for word in own) else ["model.api=http://127.0.0.1:9/v1"]
    done = call(*api, *own, "limit=2", f"output_dir={tmp_path}/results", f"data_dir={data_dir}")
    assert done.code == 2 and said in done.err, done.err
    assert not (tmp_path / "results").exists()


def test_an_endpoint_that_is_not_there_is_said(tmp_path: Path, sums: list[str]) -> None:
    done = ask("http://127.0.0.1:9", sums, "endpoint.retries=0", "limit=2")
    assert done.code == 1 and "2 of 2 requests failed" in done.err and "refused" in done.err
