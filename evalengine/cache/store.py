"""`answers.sqlite`: answers by key, in SQLite's WAL mode, which many processes of one machine read and write at once.

Every entry carries the SHA-256 of its key and its content. SQLite itself does not notice a flipped bit in a value: such
an entry is reported as corrupt, and its place is taken by the next answer under its key.

A process killed in mid-write leaves whole batches only (SQLite's journal sees to that).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from evalengine.errors import ConfigError, EvalEngineError
from evalengine.records.schema import Answer, packed_ids
from evalengine.util.plain_files import parse_json

FILE = "answers.sqlite"
APPLICATION_ID, VERSION = 0x65766C61, 1  # "evla" in ASCII; the version of the tables below
BUSY_SECONDS = 30.0  # how long to wait for another process's batch, which takes milliseconds
AT_ONCE = 1000  # most keys in one query
_TABLES = (
    "CREATE TABLE IF NOT EXISTS models (id INTEGER PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, name TEXT, facts TEXT)",
    "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, model INTEGER NOT NULL, written INTEGER NOT NULL, "
    "token_ids BLOB, logprobs BLOB, finish_reason BLOB, is_greedy INTEGER, text BLOB, top_ids BLOB, top_logprobs BLOB, "
    "sha256 BLOB)",
)
_ADVICE = "delete it (every answer is then computed again), or name another folder"
# What SQLite says of a file that is whole and cannot be used now, and what helps.
_PASSING = {
    "locked": "another process holds it: try again when that has ended",
    "full": "free space on its disk",
    "disk I/O error": "look at its disk",
}


class CacheUnavailableError(EvalEngineError):
    """A cache that cannot be used now, although nothing shows that it is damaged."""


def advice(error: Exception) -> str:
    """The fix for an error of SQLite: a file that is locked, or whose disk is full, is not to be deleted."""
    return next((words for said, words in _PASSING.items() if said in str(error)), _ADVICE)


class Row(NamedTuple):
    """One answer as the table holds it, its arrays as little-endian bytes. A score's row has no token ids, which are
    its request's."""

    token_ids: bytes | None  # int32 [tokens]
    logprobs: bytes  # float32 [tokens]
    finish_reason: bytes
    is_greedy: bool
    text: bytes  # UTF-8
    top_ids: bytes | None  # int32 [tokens, n]
    top_logprobs: bytes | None  # float32 [tokens, n]

    @classmethod
    def of(cls, answer: Answer, is_score: bool) -> Row:
        """The row that holds an answer."""
        assert answer.logprobs.dtype == np.float32
        return cls(
            token_ids=None if is_score else packed_ids(answer.output_ids),
            logprobs=answer.logprobs.astype("<f4").tobytes(),
            finish_reason=answer.finish_reason.encode(),
            is_greedy=answer.is_greedy,
            text=answer.text.encode("utf-8", "surrogatepass"),
            top_ids=None if answer.top_ids is None else answer.top_ids.astype("<i4").tobytes(),
            top_logprobs=None if answer.top_logprobs is None else answer.top_logprobs.astype("<f4").tobytes(),
        )

    def answer(self, scored: Sequence[int] | None) -> Answer:
        """The answer in this row. scored: the tokens of a score's request; None for a generation's.

        Raises ValueError for a row of the other kind, half a number, a text that is no UTF-8, and alternatives that are
        no table.
        """
        if (scored is None) != (self.token_ids is not None):
            raise ValueError("a row of the other kind of request")
        ids = np.frombuffer(self.token_ids or b"", dtype="<i4").tolist() if scored is None else scored
        top_ids = top_logprobs = None
        if self.top_ids is not None and self.top_logprobs is not None:
            top_ids = np.frombuffer(self.top_ids, dtype="<i4").reshape(len(ids), -1)
            top_logprobs = np.frombuffer(self.top_logprobs, dtype="<f4").reshape(len(ids), -1)
        return Answer(
            output_ids=ids,
            logprobs=np.frombuffer(self.logprobs, dtype="<f4").astype(np.float32),
            finish_reason=self.finish_reason.decode("ascii", "replace"),
            text=self.text.decode("utf-8", "surrogatepass"),
            is_greedy=bool(self.is_greedy),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def sha256(self, key: bytes) -> bytes:
        """SHA-256 over the key and every field, each with its length before it."""
        parts = (key, self.token_ids, self.logprobs, self.finish_reason, self.text, self.top_ids, self.top_logprobs)
        lengths = struct.pack("<8q", bool(self.is_greedy), *[-1 if part is None else len(part) for part in parts])
        return hashlib.sha256(b"".join([lengths, *[part for part in parts if part]])).digest()


_CONTENT = ", ".join(Row._fields)


@dataclass(frozen=True)
class Lookup:
    """The entries stored under some keys."""

    entries: dict[bytes, Row] = field(default_factory=dict)
    corrupt: list[bytes] = field(default_factory=list)  # keys whose entries fail their own hash


class Store:
    """An open cache. Use it as a context manager. Every method raises `sqlite3.Error` where the file fails it."""

    def __init__(self, path: Path, connection: sqlite3.Connection, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only  # the folder cannot be written: answers are read, none is written
        self._connection = connection

    @classmethod
    def open(cls, folder: str | Path, create: bool = True) -> Store:
        """The cache in `folder`, which is made if it is not there, unless `create` is false.

        Raises: ConfigError for a folder that cannot be made or holds something else under the cache's name;
        CacheUnavailableError for one that may be of use another time.
        """
        path = Path(folder) / FILE
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            if not create and not path.is_file():
                raise ConfigError(f"{folder}: no cache here ({FILE} is missing)")
            return cls._opened(path)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CacheUnavailableError(f"{path}: {error.strerror}; {_PASSING['full']}") from error
            raise ConfigError(f"cache={folder}: {error.strerror or error}; name another folder") from error
        except sqlite3.Error as error:
            if (words := advice(error)) != _ADVICE:
                raise CacheUnavailableError(f"{path}: {error}; {words}") from error
            raise ConfigError(f"{path}: not a cache that can be read ({error}); {_ADVICE}") from error

    @classmethod
    def empty(cls, folder: str | Path) -> Store:
        """A store that holds nothing, in place of the cache in `folder`, which is unavailable."""
        return cls(Path(folder) / FILE, sqlite3.connect(":memory:"), read_only=False)

    @classmethod
    def _opened(cls, path: Path) -> Store:
        try:
            return cls(path, _connected(path, "rwc", _prepared), read_only=False)
        except sqlite3.OperationalError as error:
            full = "full" in str(error)  # what is there can still be read
            denied = any(words in str(error) for words in ("readonly", "unable to open"))
            if not denied and not (full and path.is_file() and path.stat().st_size):
                raise
        try:
            return cls(path, _connected(path, "ro", _checked), read_only=True)
        except sqlite3.OperationalError as error:
            # In a folder that cannot be written, SQLite reads a WAL database only if it knows that no one writes to it.
            # If another machine does write to it, an entry's hash detects torn data.
            if not path.is_file():
                raise ConfigError(f"cache={path.parent}: cannot be written, and holds no answers to read ({error}); "
                                  "name another folder") from error  # fmt: skip
            return cls(path, _connected(path, "ro&immutable=1", _checked), read_only=True)

    def get(self, keys: Iterable[bytes]) -> Lookup:
        """The entries under those keys that have one."""
        lookup, unique_keys = Lookup(), list(dict.fromkeys(keys))
        for start in range(0, len(unique_keys), AT_ONCE):
            some = unique_keys[start : start + AT_ONCE]
            query = f"SELECT key, sha256, {_CONTENT} FROM answers WHERE key IN ({','.join('?' * len(some))})"
            for key, stored_hash, *content in self._connection.execute(query, some):
                row = Row(*content)
                if _is_plain(row) and row.sha256(key) == stored_hash:
                    lookup.entries[key] = row
                else:
                    lookup.corrupt.append(key)
        return lookup

    def put(
        self, facts: Mapping[str, Any], entries: Sequence[tuple[bytes, Row]], replace: Iterable[bytes] = ()
    ) -> None:
        """Keeps answers of one model, all or none. facts: what computed them, shown by `evalengine cache`; they need a
        "name". An entry that is there already stays, unless its key is among `replace`."""
        now, doomed = int(time.time()), set(replace)
        with self._writing():
            model = self._model(facts)
            self._connection.executemany("DELETE FROM answers WHERE key = ?", [(k,) for k, _ in entries if k in doomed])
            self._connection.executemany(
                f"INSERT OR IGNORE INTO answers (key, model, written, sha256, {_CONTENT}) "
                f"VALUES ({','.join('?' * 11)})",
                [(key, model, now, entry.sha256(key), *entry) for key, entry in entries],
            )

    def forget(self, keys: Iterable[bytes]) -> None:
        """Deletes the entries under those keys."""
        with self._writing():
            self._connection.executemany("DELETE FROM answers WHERE key = ?", [(key,) for key in keys])

    def models(self) -> list[dict[str, Any]]:
        """Each model's name, facts (none if damaged), entries, their bytes, and when the first and last were written
        (UNIX seconds)."""
        size = "+".join(f"coalesce(length(a.{name}), 0)" for name in ("key", "sha256", *_CONTENT.split(", ")))
        query = (
            f"SELECT m.name, m.facts, count(a.key), coalesce(sum({size}), 0), min(a.written), max(a.written) "
            "FROM models m LEFT JOIN answers a ON a.model = m.id GROUP BY m.id ORDER BY m.id"
        )
        names = ("name", "facts", "entries", "bytes", "first", "last")
        rows = [dict(zip(names, row, strict=True)) for row in self._connection.execute(query)]
        return [{**row, "name": _text(row["name"]), "facts": _facts(row["facts"])} for row in rows]

    def size(self) -> int:
        """Bytes that the cache takes on disk."""
        return sum(file.stat().st_size for file in self.path.parent.glob(f"{FILE}*"))

    def prune(self, before: int | None = None, keep_bytes: int | None = None) -> int:
        """Deletes entries written before `before` (UNIX seconds), then the oldest until the file holds at most
        `keep_bytes` bytes or no entry; gives the space back and returns how many entries were deleted."""
        deleted = 0
        if before is not None:
            deleted += self._delete("DELETE FROM answers WHERE written < ?", before)
        while keep_bytes is not None and (oldest := self._beyond(keep_bytes)):
            by_age = "SELECT key FROM answers ORDER BY written, rowid LIMIT ?"
            deleted += self._delete(f"DELETE FROM answers WHERE key IN ({by_age})", oldest)
        return deleted

    def _delete(self, statement: str, value: int) -> int:
        with self._writing():
            deleted = self._connection.execute(statement, (value,)).rowcount
            self._connection.execute("DELETE FROM models WHERE id NOT IN (SELECT DISTINCT model FROM answers)")
        self._connection.execute("VACUUM")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return deleted

    def _beyond(self, keep_bytes: int) -> int:
        """How many entries, which are of similar sizes, the file holds beyond `keep_bytes` bytes."""
        (entries,) = self._connection.execute("SELECT count(*) FROM answers").fetchone()
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (page_size,) = self._connection.execute("PRAGMA page_size").fetchone()
        used = pages * page_size
        return -(-entries * (used - keep_bytes) // used) if used > keep_bytes else 0

    def close(self) -> None:
        """Closes the database; further calls do nothing."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _model(self, facts: Mapping[str, Any]) -> int:
        text = json.dumps(facts, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._connection.execute(
            "INSERT OR IGNORE INTO models (sha256, name, facts) VALUES (?, ?, ?)", (digest, str(facts["name"]), text)
        )
        (number,) = self._connection.execute("SELECT id FROM models WHERE sha256 = ?", (digest,)).fetchone()
        return int(number)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction, which is committed whole or not at all."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk has rolled the transaction back already
                self._connection.execute("ROLLBACK")
            raise


def _connected(path: Path, mode: str, prepare: Any) -> sqlite3.Connection:
    """A connection that reads texts as bytes: a damaged text must not end a query over a thousand others."""
    uri = f"file:{quote(os.path.abspath(path))}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    connection.text_factory = bytes
    try:
        prepare(connection, path)
    except UnicodeDecodeError as error:  # Python decodes SQLite's message, which quotes the damaged text
        connection.close()
        raise sqlite3.DatabaseError("the description of its tables is damaged") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _prepared(connection: sqlite3.Connection, path: Path) -> None:
    _in_wal_mode(connection)
    connection.execute("PRAGMA synchronous=NORMAL")  # a power cut may cost the last batches, never a whole file
    if _is_empty(connection):  # a cache that is there is opened while a process may write it
        connection.execute("BEGIN IMMEDIATE")
        if _is_empty(connection):
            for statement in _TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    _checked(connection, path)


def _in_wal_mode(connection: sqlite3.Connection) -> None:
    """Switches to WAL mode. SQLite's own waiting does not cover two processes that switch at once, so this retries."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def _checked(connection: sqlite3.Connection, path: Path) -> None:
    """Raises ConfigError for a database of another program, or a cache of another version."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise ConfigError(f"{path}: a database of another program, not a cache of answers; name another folder")
    if version != VERSION:
        raise ConfigError(f"{path}: a cache of version {version}, this evalengine reads {VERSION}; {_ADVICE}")
    tables = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY rowid")]
    if tables != [statement.replace("IF NOT EXISTS ", "").encode() for statement in _TABLES]:
        raise sqlite3.DatabaseError("the description of its tables is damaged")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "?"


def _facts(value: Any) -> dict[str, Any]:
    """The setup that computed a model's answers. It is only shown: damage to it invalidates no answer."""
    try:
        facts = parse_json(_text(value))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_plain(row: Row) -> bool:
    """Whether every value has the type with which it was written."""
    whole = type(row.logprobs) is type(row.finish_reason) is type(row.text) is bytes and row.is_greedy in (0, 1)
    return whole and {type(row.token_ids), type(row.top_ids), type(row.top_logprobs)} <= {bytes, type(None)}
