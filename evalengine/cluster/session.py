"""The Ray that a run uses: the one that this process is connected to, the named cluster, or our own for the run.

Our own Ray leaves nothing: its processes end with this one, whatever ends it, and its folder is removed; the next run
removes what a killed run left behind.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evalengine.errors import ConfigError, EvalEngineError

PREFIX = "evalengine-ray-"
LONGEST_PARENT = 30  # characters: Ray adds some 70 for its sockets, and Unix allows 107
CONNECT_SECONDS = 10.0
# Shared memory for Ray's objects: leases and answers are small, and by default Ray takes a third of all memory.
STORE_BYTES = 128 << 20
# The token keeps others on this machine and its network out. It is drawn once a process, as Ray reads it once.
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def ray_session(address: str | None, cpus: int) -> Iterator[Path | None]:
    """A context in which Ray is connected; yields the log folder of a Ray of our own, None for one that ran already.

    cpus: what our own Ray is told that this machine has. Raises ConfigError for a cluster that cannot be joined.
    """
    import ray

    if ray.is_initialized():
        yield None
    elif address is not None:
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            _knock(address)
            try:
                with _own_sigterm():
                    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # Ray raises a bare one for a node that does not answer in time
                why = str(error).split("\n")[0]
                raise ConfigError(f"cluster.address={address}: no Ray cluster answers there ({why})") from error
            try:
                yield None
            finally:
                ray.shutdown()
    else:
        with _folder() as folder, _environment(OURS):
            try:
                _start(cpus, folder)
                yield folder / "session_latest" / "logs"
            finally:
                ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps what SIGTERM does in this program: Ray puts a handler in its place, which exits with code 15, and which
    every process inherits that is forked later. One that is ended while it starts loses the handler's exception, and
    runs on: the pool by which lm-eval estimates standard errors then waited for ever."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _start(cpus: int, folder: Path) -> None:
    """Starts a Ray of our own. Raises `EvalEngineError` if it does not start."""
    import ray

    try:
        with _own_sigterm():
            ray.init(
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=STORE_BYTES,
                _temp_dir=str(folder),
            )
    except Exception as error:  # Ray raises a bare one for a node that is not up within its 30 s
        why = str(error).split("\n")[0]
        cure = "a machine that is busy may need a second try: the same command resumes"
        raise EvalEngineError(f"cluster=ray: Ray did not start here ({why}); {cure}") from error


def _knock(address: str) -> None:
    """Raises ConfigError if nobody listens at host:port: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto" or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cluster.address={address}: nothing answers there ({error})") from error


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for Ray, which is removed at the end or by a later run; its lock shows that its owner lives."""
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= LONGEST_PARENT else "/tmp"
    _sweep(Path(parent))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Removes the folders for Ray whose process is gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the folder is another user's, or was made a moment ago
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables for Ray's processes, unless the user has set them; removes them afterwards."""
    before = {*os.environ}
    os.environ.update({name: value for name, value in values.items() if name not in before})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("RAY_") and name not in before]:
            del os.environ[name]  # Ray sets some itself
