"""A cache that is damaged, forged, full or cut short: what is noticed, computed again and kept."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalengine.cache import engine as cached_engine
from evalengine.cache.store import FILE, Store
from evalengine.engine.llm import LLM
from tests.e2e.cache_runs import ROWS, SETTINGS, counts, run
from tests.e2e.command import Run, call, runs


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


def forge(cache: Path, number: int) -> None:
    """Changes one logprob in the entry `number`, and seals the entry again, so that it passes its own hash."""
    with Store.open(cache) as store:
        rows = store._connection.execute("SELECT key FROM answers ORDER BY rowid").fetchall()
        (key,) = rows[number]
        entry = store.get([key]).entries[key]
        logprobs = np.frombuffer(entry.logprobs, dtype="<f4").copy()
        logprobs[2] = np.nextafter(logprobs[2], np.float32(-9))
        facts = store.models()[0]["facts"]
        store.put(facts, [(key, type(entry)(**{**vars(entry), "logprobs": logprobs.tobytes()}))], replace=[key])


def test_an_audit_finds_a_forged_answer(copied_cache: Path, tmp_path: Path, warm_cache: tuple[Path, Run]) -> None:
    forge(copied_cache, 1)
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
    """Settings of the cache that cannot work are refused before anything is written."""
    (tmp_path / "file").write_text("")
    filled_settings = [setting.replace("{file}", str(tmp_path / "file")) for setting in settings]
    done = call(f"output_dir={tmp_path / 'out'}", *SETTINGS, *filled_settings)
    assert done.code == 2 and words in done.err
    assert not (tmp_path / "out").exists() and not Path("c").exists()
