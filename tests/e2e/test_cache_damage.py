"""A cache that is damaged, forged, full or cut short: what is noticed, computed again and kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.cache import engine as cached_engine
from evalengine.cache import store as store_module
from evalengine.cache.store import FILE, Row, Store
from evalengine.engine.llm import LLM
from tests.e2e.cache_runs import ROWS, SETTINGS, counts, run
from tests.e2e.command import Run, call, over, runs


def change(cache: Path, statement: str, *values: Any) -> None:
    """Runs an SQL statement, which must change some row, on the cache's file."""
    with closing(sqlite3.connect(cache / FILE)) as raw:
        assert raw.execute(statement, values).rowcount > 0
        raw.commit()


def test_a_damaged_entry_is_named_computed_again_and_replaced(
    copied_cache: Path, tmp_path: Path, warm_cache: Any
) -> None:
    change(copied_cache, "UPDATE answers SET logprobs = zeroblob(length(logprobs)) WHERE rowid = 1")
    done = call(f"output_dir={tmp_path / 'first'}", *SETTINGS, f"cache={copied_cache}")
    assert done.code == 0 and "damaged entries, whose requests are computed again: arithmetic, document" in done.err
    (first,) = runs(tmp_path / "first")
    assert first.manifest["cache"]["corrupt"] == 1 and counts(first) == (ROWS - 1, 1)
    assert "1 entries of the cache were damaged" in done.out
    second = run(tmp_path / "second", f"cache={copied_cache}")
    assert counts(second) == (ROWS, 0) and first.digest == second.digest == warm_cache[1].digest


def forge(cache: Path, number: int, changed: Callable[[Row], Row]) -> None:
    """Changes the entry `number`, and seals it again, so that it passes its own hash."""
    with Store.open(cache) as store:
        rows = store._connection.execute("SELECT key FROM answers ORDER BY key").fetchall()
        (key,) = rows[number]
        facts = store.models()[0]["facts"]
        store.put(facts, [(key, changed(store.get([key]).entries[key]))], replace=[key])


def another_logprob(entry: Row) -> Row:
    logprobs = np.frombuffer(entry.logprobs, dtype="<f4").copy()
    logprobs[2] = np.nextafter(logprobs[2], np.float32(-9))
    return entry._replace(logprobs=logprobs.tobytes())


def ids(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


IMPOSSIBLE: dict[str, Any] = {
    "another text": {"text": b"1"},
    "no UTF-8": {"text": b"\xff"},
    "an id beyond the vocabulary": {"token_ids": ids(5, 6, 7, 10**9)},
    "a negative id": {"token_ids": ids(5, 6, 7, -1)},
    "half an id": {"token_ids": ids(5, 6, 7, 8)[:-2]},
    "no ids": {"token_ids": None},
    "NaN": {"logprobs": floats(-1, -1, -1, float("nan"))},
    "a probability above 1": {"logprobs": floats(-1, -1, -1, 5)},
    "half a logprob": {"logprobs": floats(-1, -1, -1, -1)[:-1]},
    "no tokens": {"token_ids": b"", "logprobs": b"", "text": b""},
    "too few tokens": {"token_ids": ids(5), "logprobs": floats(-1)},
    "too many tokens": {"token_ids": ids(*[5] * 500), "logprobs": floats(*[-1] * 500)},
    "an ending that did not come": {"finish_reason": b"stop"},
    "an ending that there is not": {"finish_reason": b"\xff"},
    "alternatives that nobody asked for": {"top_ids": ids(1, 2, 3, 4), "top_logprobs": floats(-1, -1, -1, -1)},
}


def test_an_answer_that_cannot_be_is_computed_again(
    copied_cache: Path, tmp_path: Path, warm_cache: tuple[Path, Run]
) -> None:
    """Whoever can write a shared cache can seal what they write: the hash alone would let every one of these pass."""
    names = [*IMPOSSIBLE]
    for some in (names[start : start + ROWS] for start in range(0, len(names), ROWS)):
        for number, name in enumerate(some):
            forge(copied_cache, number, lambda entry, name=name: entry._replace(**IMPOSSIBLE[name]))  # type: ignore[misc]
        forged = run(tmp_path / some[0], f"cache={copied_cache}")
        assert counts(forged) == (ROWS - len(some), len(some)), some
        assert forged.manifest["cache"]["corrupt"] == len(some)
        assert forged.digest == warm_cache[1].digest and forged.results == warm_cache[1].results


def test_an_audit_finds_a_forged_answer(copied_cache: Path, tmp_path: Path, warm_cache: tuple[Path, Run]) -> None:
    forge(copied_cache, 1, another_logprob)
    unseen = run(tmp_path / "unseen", f"cache={copied_cache}")
    assert counts(unseen) == (ROWS, 0) and unseen.digest != warm_cache[1].digest, "its own hash does not show it"
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={copied_cache}", "cache.audit=1")
    assert done.code == 1
    assert "cache.audit: arithmetic, document" in done.err and "the logprob of token 2 (id " in done.err
    assert " in the cache and " in done.err and " computed again" in done.err
    (failed,) = runs(tmp_path / "out")
    assert not (failed.folder / "journal.jsonl").read_bytes(), "no answer of a cache that lies is journaled"


@pytest.mark.parametrize(("share", "audited"), [("0.01", 1), ("1", ROWS)])
def test_a_true_cache_passes_its_audit(warm_cache: Any, tmp_path: Path, share: str, audited: int) -> None:
    audited_run = run(tmp_path, f"cache={warm_cache[0]}", f"cache.audit={share}")
    assert audited_run.manifest["cache"]["audited"] == audited and audited_run.digest == warm_cache[1].digest


def test_a_full_disk_ends_the_cache_and_not_the_run(
    tmp_path: Path, warm_cache: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, *_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "put", full)
    monkeypatch.setattr(cached_engine, "BATCH", 1)
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={tmp_path / 'cache'}")
    (result,) = runs(tmp_path / "out")
    assert done.code == 0 and result.digest == warm_cache[1].digest
    assert done.err.count("the run goes on without the cache") == 1
    assert result.manifest["cache"]["failed"] == "database or disk is full" and result.manifest["cache"]["kept"] == 0


def test_a_full_disk_at_the_opening_ends_no_run(
    copied_cache: Path, tmp_path: Path, warm_cache: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is there is read all the same; where there is none yet, the run does without."""

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store_module, "_prepared", full)
    read = run(tmp_path / "read", f"cache={copied_cache}")
    assert counts(read) == (ROWS, 0) and read.manifest["cache"]["read_only"]
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={tmp_path / 'new'}")
    (result,) = runs(tmp_path / "out")
    assert done.code == 0 and result.digest == warm_cache[1].digest and counts(result) == (0, ROWS)
    assert done.err.count("free space on its disk; the run goes on without the cache") == 1
    assert "delete" not in done.err and "database or disk is full" in result.manifest["cache"]["failed"]


def test_a_cache_that_another_process_holds_is_not_to_be_deleted(
    copied_cache: Path, tmp_path: Path, warm_cache: tuple[Path, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.1)
    with closing(sqlite3.connect(copied_cache / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert counts(run(tmp_path / "read", f"cache={copied_cache}")) == (ROWS, 0), "who only reads need not wait"
        other.execute("ROLLBACK")
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE answers SET written = written")
        done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={copied_cache}")
        shown = call("cache", str(copied_cache))
    (result,) = runs(tmp_path / "out")
    assert done.code == 0 and result.digest == warm_cache[1].digest
    assert done.err.count("the run goes on without the cache") == 1 and shown.code == 1
    for text in (done.err, shown.err):
        assert "another process holds it: try again when that has ended" in text and "delete" not in text


def test_a_torn_file_ends_the_cache_and_not_the_run(
    copied_cache: Path, tmp_path: Path, warm_cache: tuple[Path, Run]
) -> None:
    content = bytearray((copied_cache / FILE).read_bytes())
    content[4096 * 3 :] = b"\xff" * len(content[4096 * 3 :])
    (copied_cache / FILE).write_bytes(content)
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, f"cache={copied_cache}")
    (result,) = runs(tmp_path / "out")
    assert done.code == 0 and result.digest == warm_cache[1].digest
    assert done.err.count("the run goes on without the cache") == 1


def test_an_interrupted_run_has_kept_what_it_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(10**6))
    real = LLM._step

    def step(self: LLM) -> Any:
        outputs = real(self)
        if next(steps) > 6:  # Two requests at a time end at the fifth step.
            raise KeyboardInterrupt
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "_step", step)
        call(f"output_dir={tmp_path / 'out'}", *over(SETTINGS, f"cache={tmp_path / 'cache'}", "engine.max_num_seqs=2"))
    hits, misses = counts(run(tmp_path / "again", f"cache={tmp_path / 'cache'}"))
    assert 0 < hits < ROWS and hits + misses == ROWS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("cache=c", "batch_invariant=false"), "bits of fast numerics depend on the batch"),
        (("cache=c", "batch_invariant=false", "numerics=fast"), "bits of fast numerics depend on the batch"),
        (("cache.audit=0.1",), "there is no cache to audit"),
        (("cache=c", "cache.audit=1.5"), "must be in 0 .. 1"),
        (("cache=",), "cache.path='': must have at least 1 character"),
        (("cache={file}",), "exists and is not a folder"),
    ],
)
def test_what_cannot_be_is_refused_at_start(tmp_path: Path, settings: Sequence[str], words: str) -> None:
    """Settings of the cache that cannot work are refused before anything is written."""
    (tmp_path / "file").write_text("")
    filled_settings = [setting.replace("{file}", str(tmp_path / "file")) for setting in settings]
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, *filled_settings)
    assert done.code == 2 and words in done.err
    assert not (tmp_path / "out").exists() and not Path("c").exists()
