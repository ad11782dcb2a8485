"""The cache's file: what is written is read back, damage is found, and no other process is in the way."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalengine.cache.store import FILE, Row, Store
from evalengine.cli.commands import cache as main
from evalengine.errors import ConfigError

FACTS = {"name": "m", "weights": "ab" * 32, "numerics": "exact", "dtype": "float32", "contract_version": 2}
ENTRY = Row(b"\1\0\0\0\2\0\0\0", b"\0\0\x80\xbf" * 2, b"stop", True, "a\x00ü".encode(), b"\3\0\0\0", b"\0\0\0\0")
EMPTY = Row(None, b"", b"", False, b"", None, None)
optional = st.none() | st.binary(max_size=40)
binary = st.binary(max_size=9)
entries = st.builds(Row, optional, binary, binary, st.booleans(), binary, optional, optional)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def fill(folder: Path, count: int, start: int = 0) -> None:
    """Writes `count` answers under the keys from `start` on."""
    with Store.open(folder) as store:
        store.put(FACTS, [(key(start + i), ENTRY) for i in range(count)])


@settings(max_examples=40, deadline=None)
@given(st.lists(entries, max_size=6))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, drawn: list[Row]) -> None:
    """The entries that a store takes are read from it, and from the file when it is opened again."""
    folder = tmp_path_factory.mktemp("cache")
    kept = {key(i): entry for i, entry in enumerate(drawn)}
    with Store.open(folder) as store:
        store.put(FACTS, [*kept.items()])
        assert store.get([*kept, key(99)]).entries == kept
    with Store.open(folder) as store:
        assert store.get([*kept, key(99)]).entries == kept


@given(
    entries, st.sampled_from(["logprobs", "token_ids", "text", "is_greedy", "finish_reason", "top_ids", "top_logprobs"])
)
def test_the_hash_is_over_every_field_and_the_key(entry: Row, name: str) -> None:
    value = getattr(entry, name)
    other = entry._replace(**{name: (not value) if name == "is_greedy" else (value or b"") + b"\0"})
    assert entry.sha256(key(1)) != other.sha256(key(1))
    assert entry.sha256(key(1)) != entry.sha256(key(2))


def test_fields_do_not_run_into_one_another() -> None:
    rows = [EMPTY._replace(logprobs=b"ab", finish_reason=b"c"), EMPTY._replace(logprobs=b"a", finish_reason=b"bc")]
    rows += [EMPTY, EMPTY._replace(top_ids=b"")]
    assert len({row.sha256(key(1)) for row in rows}) == 4


@pytest.mark.parametrize("change", [
    "logprobs = x'000080bf000080bc'", "is_greedy = 0", "token_ids = NULL", "text = 'a'", "sha256 = NULL",
    "logprobs = 'no bytes'", "is_greedy = 7", "finish_reason = 3", "top_ids = 1.5", "text = CAST(x'ff' AS TEXT)",
])  # fmt: skip
def test_damage_is_found_and_replaced(tmp_path: Path, change: str) -> None:
    fill(tmp_path, 3)
    with closing(sqlite3.connect(tmp_path / FILE)) as raw:
        raw.execute(f"UPDATE answers SET {change} WHERE key = ?", (key(1),))
        raw.commit()
    with Store.open(tmp_path) as store:
        lookup = store.get(key(i) for i in range(3))
        assert [*lookup.entries] == [key(0), key(2)] and lookup.corrupt == [key(1)]
        store.put(FACTS, [(key(1), ENTRY)])
        assert store.get([key(1)]).corrupt, "an answer does not replace another unless it is told to"
        store.put(FACTS, [(key(1), ENTRY)], replace=[key(1)])
        assert store.get([key(1)]).entries == {key(1): ENTRY}


def test_an_entry_under_another_key_is_damage(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    with closing(sqlite3.connect(tmp_path / FILE)) as raw:
        raw.execute("DELETE FROM answers WHERE key = ?", (key(0),))
        raw.execute("UPDATE answers SET key = ? WHERE key = ?", (key(0), key(1)))
        raw.commit()
    with Store.open(tmp_path) as store:
        assert store.get([key(0)]).corrupt == [key(0)]


def test_a_batch_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        with pytest.raises(TypeError):
            store.put(FACTS, [(key(0), ENTRY), (key(1), ENTRY._replace(logprobs=object()))])  # type: ignore[arg-type]
        assert not store.get([key(0), key(1)]).entries
        store.put(FACTS, [(key(0), ENTRY)])
        assert store.get([key(0)]).entries


WRITER = """
import sys
from evalengine.cache.store import Store
from tests.unit.test_cache_store import ENTRY, FACTS, key
number = int(sys.argv[2])
with Store.open(sys.argv[1]) as store:
    print("open", flush=True)
    for batch in range(int(sys.argv[3])):
        store.put({**FACTS, "name": str(number)}, [(key(batch * 16 + i), ENTRY) for i in range(16)])
        print(batch, flush=True)
"""


def writer(folder: Path, number: int, batches: int) -> subprocess.Popen[str]:
    """A process that writes so many batches of 16 answers."""
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(number), str(batches)],
                            stdout=subprocess.PIPE, text=True)  # fmt: skip


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    """Three processes make the file together and write the same keys."""
    processes = [writer(tmp_path, number, 30) for number in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    with Store.open(tmp_path) as store:
        lookup = store.get(key(i) for i in range(30 * 16))
        assert len(lookup.entries) == 30 * 16 and not lookup.corrupt
        assert sum(model["entries"] for model in store.models()) == 30 * 16


def test_a_killed_writer_leaves_whole_batches(tmp_path: Path) -> None:
    process = writer(tmp_path, 0, 100_000)
    assert process.stdout is not None
    while process.stdout.readline() != "20\n":
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Store.open(tmp_path) as store:
        assert len(store.get(key(i) for i in range(20 * 16)).entries) == 20 * 16
        (model,) = store.models()
        assert model["entries"] % 16 == 0, "a batch is whole"
        store.put(FACTS, [(key(10**6), ENTRY)])
        assert store.get([key(10**6)]).entries


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.put(FACTS, [(key(0), ENTRY)])
        store._connection.execute("PRAGMA max_page_count=12")  # SQLite's own "database or disk is full"
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.put(FACTS, [(key(i), ENTRY._replace(text=bytes(9000))) for i in range(1, 9)])
        assert [*store.get(key(i) for i in range(9)).entries] == [key(0)]


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A cache in a folder that this process, no longer root, may only read."""
    folder, user = Path(tempfile.mkdtemp()), os.geteuid()  # pytest's own folders are closed to other users
    fill(folder, 2)
    folder.chmod(0o555)
    (folder / FILE).chmod(0o444)
    if user == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_that_cannot_be_written_is_read(read_only_folder: Path) -> None:
    with Store.open(read_only_folder) as store:
        assert store.read_only and len(store.get([key(0), key(1)]).entries) == 2
        with pytest.raises(sqlite3.OperationalError):
            store.put(FACTS, [(key(5), ENTRY)])


def test_no_cache_can_be_made_where_nothing_can_be_written(read_only_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"Permission denied; name another folder"):
        Store.open(read_only_folder / "inner")


@pytest.mark.parametrize(("content", "words"), [
    (b"not a database at all" * 100, "not a cache that can be read.*delete it"),
    (None, "a database of another program"),
])  # fmt: skip
def test_what_is_no_cache_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is None:
        with closing(sqlite3.connect(tmp_path / FILE)) as raw:
            raw.execute("CREATE TABLE t (x)")
            raw.commit()
    else:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        Store.open(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with closing(sqlite3.connect(tmp_path / FILE)) as raw:
        raw.execute("PRAGMA user_version=7")
    with pytest.raises(ConfigError, match="a cache of version 7, this evalengine reads 1"):
        Store.open(tmp_path)


def test_the_command_lists_and_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 2000)
    with closing(sqlite3.connect(tmp_path / FILE)) as raw:
        raw.execute("UPDATE answers SET written = ? WHERE key < ?", (int(time.time()) - 40 * 86_400, key(300)))
        raw.commit()
    assert main([str(tmp_path)]) == 0
    assert "2,000 answers" in capsys.readouterr().out
    assert main([str(tmp_path), "--prune", "older-than=30d"]) == 0
    out = capsys.readouterr().out
    assert "300 answers deleted" in out and "1,700 answers" in out
    with Store.open(tmp_path) as store:
        assert store.prune(keep_bytes=60_000) > 0
        (model,) = store.models()
        assert 0 < model["entries"] < 1700
    assert (tmp_path / FILE).stat().st_size <= 60_000
    assert main([str(tmp_path), "--prune", "size=1GB"]) == 0


@pytest.mark.parametrize("words", [["--prune", "old"], ["--prune", "older-than=3"], ["--prune", "size=3d"]])
def test_the_command_refuses_other_limits(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="must be older-than=30d"):
        main([str(tmp_path), *words])


def test_the_command_makes_no_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cache here"):
        main([str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_damage_to_the_description_of_the_tables_is_a_sentence(tmp_path: Path) -> None:
    """Python cannot decode what SQLite says of it: every third byte of that text is damaged, in two ways by turns."""
    fill(tmp_path, 1)
    whole = (tmp_path / FILE).read_bytes()
    begins = [whole.index(b"CREATE TABLE models"), whole.index(b"CREATE TABLE answers")]
    for place in (place for begin in begins for place in range(begin, whole.index(b")", begin), 3)):
        damaged = bytes([0xFF if place % 2 else whole[place] ^ 1])
        (tmp_path / FILE).write_bytes(whole[:place] + damaged + whole[place + 1 :])
        with pytest.raises(ConfigError, match=r"answers\.sqlite: not a cache that can be read .*; delete it"):
            Store.open(tmp_path)
