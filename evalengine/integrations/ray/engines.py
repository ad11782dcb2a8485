"""`RayEngines`: answers requests as an `LLM` does, by replicas of it, and holds no weights itself.

Its Ray is the one that this process is connected to, the named cluster, or one started for the run. A started Ray
leaves nothing: its processes end with this one, whatever ends it, and its folder is removed; the next run removes what
a killed run left behind.
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
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evalengine.config.schema import Config, ModelConfig
from evalengine.engine.interrupts import Interrupts
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.engine.prompts import items
from evalengine.engine.protocol import EngineFacts, OnStep
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.settings import local_replicas
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import check_requests
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.integrations.ray.dispatch import POLL_SECONDS, SAY_SECONDS, Dispatch, Roster
from evalengine.integrations.ray.pool import Pool, Share, cluster_share, local_share
from evalengine.integrations.ray.replica import ReplicaFacts, ReplicaSpec
from evalengine.integrations.ray.work import Work, sample
from evalengine.plain_text import warn

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIX = "evalengine-ray-"
LONGEST_PARENT = 30  # characters: Ray adds some 70 for its sockets, and Unix allows 107
CONNECT_SECONDS = 10.0
# Shared memory for Ray's objects: leases and answers are small, and by default Ray takes a third of all memory.
STORE_BYTES = 128 << 20
# The token keeps others on this machine and its network out. It is drawn once a process, as Ray reads it once.
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


class RayEngines:
    """Replicas on Ray, behind the interface of `LLM` that the harness uses.

    A context manager: inside, at least one replica is loaded; others join as they come. Ray is started if need be; a
    Ray that was started here is also stopped here.

    Raises:
        ConfigError: settings that the replicas refuse, a cluster that does not answer or has no room.
        EvalEngineError: no replica could be loaded.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.roster = Roster()
        self._run_config = config
        self._stack = ExitStack()
        self._runs = 0

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the replicas, and Ray if it was started here. Idempotent."""
        self._stack.close()

    def _start(self) -> None:
        config = self._run_config
        threading.Thread(target=self._hash_weights, daemon=True).start()
        address, configured, processors = config.cluster.address, config.cluster.replicas, os.cpu_count() or 1
        replicas = local_replicas(config) if configured == "auto" else int(configured)
        share = local_share(config, replicas, processors)
        logs = self._stack.enter_context(ray_session(address, max(processors, replicas * share.cpus)))
        if logs is None:  # The cluster ran already.
            share, replicas = self._cluster_share()
        spec = ReplicaSpec(_absolute(config.model), config.engine, config.batch_invariant, config.numerics)
        self._pool = Pool(spec, share, replicas, self.checkpoint, logs)
        self._stack.callback(self._pool.close)
        self._wait_for_the_first()

    def _hash_weights(self) -> None:
        """Hashes the weights, in a daemon thread: large files take minutes, which an early exit must not wait for. What
        fails here fails again where the hash is needed."""
        with suppress(Exception):
            weights_fingerprint(self.checkpoint)

    def _cluster_share(self) -> tuple[Share, int]:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        try:
            return cluster_share(self._run_config, nodes)
        except ValueError as error:
            raise ConfigError(f"cluster.address={self._run_config.cluster.address or 'null'}: {error}") from error

    def _wait_for_the_first(self) -> None:
        last_message, problems = time.monotonic(), []
        while self._pool.first is None:
            for event in self._pool.poll(POLL_SECONDS):
                problems += [(event.why, problem) for problem in event.problems]
                if not event.problems:
                    self.roster.note(event)
            if not self._pool.coming and self._pool.first is None:
                if problems:
                    raise ConfigError([*dict.fromkeys(problem for _, problem in problems)])
                reasons = "; ".join(dict.fromkeys([*self.roster.refused, *self.roster.failed]))
                raise EvalEngineError(f"no replica could be loaded: {reasons}")
            if time.monotonic() - last_message > SAY_SECONDS:
                last_message = time.monotonic()
                warn(f"no replica is there yet; {self._pool.coming} are being placed or read weights")
        for why, _ in problems:  # settings that only some machines refuse
            self.roster.refuse(why)

    # -- the harness's interface to an LLM -----------------------------------------------------------------------------

    @property
    def first(self) -> ReplicaFacts:
        """The replica that joined first: the others are like it."""
        assert self._pool.first is not None, "inside `with`"
        return self._pool.first

    def load(self) -> None:
        """Does nothing: inside `with`, a replica is loaded."""

    def facts(self) -> EngineFacts:
        """Those of the first replica, which the others are like, and who they all are."""
        cluster = {"cluster": self.roster.facts(), "hardware": asdict(self.first.hardware)}
        return replace(self.first.engine, cluster=cluster)

    @property
    def stats(self) -> EngineStats:
        """The statistics of all replicas together, lost ones included."""
        return self.roster.stats

    def reset_prefix_cache(self) -> None:
        """Every replica forgets the prefixes whose KV it holds."""
        self._pool.reset_prefix_cache()

    def run(self, requests: Iterable[Request], on_step: OnStep = None) -> Iterator[RequestOutput]:
        """Runs the requests on the replicas and yields each output once it stands, as `LLM.run` does.

        Raises:
            ReplicaMismatchError: an audited request whose answers differ.
            EvalEngineError: no replica is left, or a request that replicas die of.
            KeyboardInterrupt: Ctrl-C, once the steps that ran are finished and their outputs were yielded.
        """
        batch = items(requests, "requests")
        engine = self.first.engine
        check_requests(batch, engine.limits)
        audited = sample([r.request_id for r in batch], self._run_config.cluster.audit, self._run_config.seed)
        self._runs += 1
        work = Work(batch, engine.settings.block_size, audited)
        dispatch = Dispatch(self._pool, self.roster, work, batch, self._runs, engine.config.max_num_seqs)
        interrupts = self._stack.enter_context(Interrupts())
        try:
            yield from dispatch.answers(on_step, lambda: bool(interrupts.received))
            if not work.done:
                yield from dispatch.last_answers()
                interrupts.after_a_step()
        finally:
            interrupts.restore()
            dispatch.book()


def _absolute(model: ModelConfig) -> ModelConfig:
    """The model with absolute paths where they exist here, since a replica works in another folder."""
    tokenizer, adapter = (path and _absolute_path(path) for path in (model.tokenizer, model.adapter))
    alternatives = [_absolute_path(path) for path in model.alternatives]
    path = _absolute_path(model.path)
    return replace(model, path=path, tokenizer=tokenizer, adapter=adapter, alternatives=alternatives)


def _absolute_path(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


@contextmanager
def ray_session(address: str | None, cpus: int) -> Iterator[Path | None]:
    """A context in which Ray is connected; yields the log folder of a Ray of our own, None for one that ran already.

    cpus: the number of cores with which our own Ray is started. Raises ConfigError for a cluster that cannot be joined.
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
        fix = "a machine that is busy may need a second try: the same command resumes"
        raise EvalEngineError(f"cluster=ray: Ray did not start here ({why}); {fix}") from error


def _knock(address: str) -> None:
    """Raises ConfigError if no process listens at host:port: Ray itself would try for many minutes."""
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
