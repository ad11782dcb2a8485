"""`RayEngines`: answers requests as an `LLM` does, by replicas of it, and holds no weights itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalengine.cluster.dispatch import POLL_SECONDS, Dispatch
from evalengine.cluster.pool import Pool
from evalengine.cluster.replica import ReplicaFacts, ReplicaSpec
from evalengine.cluster.roster import Roster
from evalengine.cluster.session import ray_session
from evalengine.cluster.settings import Share, cluster_share, local_replicas, local_share
from evalengine.cluster.work import Work, sample
from evalengine.config.schema import Config, ModelConfig
from evalengine.engine.answering import EngineFacts, OnStep
from evalengine.engine.interrupts import Interrupts
from evalengine.engine.load.loader import Checkpoint, weights_fingerprint
from evalengine.engine.prompts import items
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.settings import Settings
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import RequestLimits, check_requests
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.plain_text import warn

if TYPE_CHECKING:
    from typing_extensions import Self

SAY_SECONDS = 30.0  # between two messages that the run waits


class RayEngines:
    """Replicas on Ray, behind the interface of `LLM` that the harness uses.

    A context manager: inside, at least one replica is loaded; others join as they come. Ray is started if need be; a
    Ray that was started here is also stopped here.

    Raises:
        ConfigError: settings that the replicas refuse, a cluster that does not answer or has no room.
        EvalEngineError: no replica could be loaded.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint) -> None:
        self.config = config.engine
        self.checkpoint = checkpoint
        self.spec, self.tokenizer = checkpoint.spec, checkpoint.tokenizer
        self.roster = Roster()
        self._run_config = config
        self._stack = ExitStack()
        self._runs = 0
        self._weights: Future[str] = Future()

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
        self._pool = Pool(spec, share, replicas, self.checkpoint, self._weights.result, logs)
        self._stack.callback(self._pool.close)
        self._wait_for_the_first()

    def _hash_weights(self) -> None:
        """Hashes the weights, in a daemon thread: large files take minutes, which an early exit must not wait for."""
        try:
            self._weights.set_result(weights_fingerprint(self.checkpoint))
        except BaseException as error:
            self._weights.set_exception(error)

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

    # -- what the harness asks of an LLM ------------------------------------------------------------------------------

    @property
    def first(self) -> ReplicaFacts:
        """The replica that joined first: the others are like it."""
        assert self._pool.first is not None, "inside `with`"
        return self._pool.first

    @property
    def settings(self) -> Settings:
        """The engine's settings, as the replicas resolved them."""
        return self.first.settings

    @property
    def limits(self) -> RequestLimits:
        """The first replica's limits for requests."""
        return self.first.limits

    @property
    def num_kv_blocks(self) -> int:
        """Pages of the first replica's pool."""
        return self.first.limits.num_kv_blocks

    @property
    def kernels_verdict(self) -> dict[str, Any] | None:
        """The first replica's verdict on its kernels."""
        return self.first.kernels_verdict

    @property
    def self_test_verdict(self) -> dict[str, Any] | None:
        """The first replica's self-test verdict."""
        return self.first.self_test_verdict

    @property
    def loaded(self) -> bool:
        """True: inside `with`, a replica is loaded."""
        return True

    def load(self) -> None:
        """Does nothing, for the same reason."""

    def facts(self) -> EngineFacts:
        """What answers depend on: the first replica's machine, which the others are like, and who they are. The
        weights' hash is that of the driver's files, which every other machine has as well."""
        first = self.first
        cluster = {"cluster": self.roster.facts(), "hardware": asdict(first.hardware)}
        return EngineFacts(self._weights.result(), first.gpu_architecture, first.libraries, cluster)

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
        check_requests(batch, self.limits)
        audited = sample([r.request_id for r in batch], self._run_config.cluster.audit, self._run_config.seed)
        self._runs += 1
        work = Work(batch, self.settings.block_size, audited)
        dispatch = Dispatch(self._pool, self.roster, work, batch, self._runs, self.config.max_num_seqs)
        interrupts = self._stack.enter_context(Interrupts())
        try:
            yield from dispatch.answers(on_step, lambda: bool(interrupts.asked))
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
