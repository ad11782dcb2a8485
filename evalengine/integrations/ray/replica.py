"""One replica: an `LLM` in its own process that takes leases and gives answers. Ray makes an actor of the class.

The engine runs in a thread, so that the actor can always report what has finished. A lease joins the requests that
run: the batch does not run empty between two leases.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from evalengine.config.schema import EngineConfig, ModelConfig
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Stamp, resolve_checkpoint, weights_fingerprint
from evalengine.engine.protocol import EngineFacts
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.stats import EngineStats
from evalengine.engine.text.tokenizer import plain_tokenizer
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.spec import ModelSpec
from evalengine.records.manifest import machine_facts
from evalengine.records.manifest_data import Hardware
from evalengine.records.sealed import content_sha256


@dataclass(frozen=True)
class ReplicaSpec:
    """The configuration of every replica."""

    model: ModelConfig
    engine: EngineConfig
    batch_invariant: bool
    numerics: str


@dataclass(frozen=True)
class ReplicaFacts:
    """A loaded replica: the facts that it must share with the others, and where it computes."""

    host: str
    node: str  # Ray's id of the machine
    pid: int
    devices: tuple[str, ...]  # Ray's numbers of its GPUs; none on a CPU
    engine: EngineFacts
    contract_version: int
    spec: ModelSpec
    tokenizer: str | None  # SHA-256
    hardware: Hardware
    stamp: Stamp = ()  # the weight files that it loaded, on its machine

    @property
    def files(self) -> tuple[str, Stamp]:
        """The machine and the weight files that it loaded there."""
        return self.node, self.stamp

    @property
    def where(self) -> str:
        """The host and the device, for people."""
        if not self.devices:
            return f"{self.host} (CPU, process {self.pid})"
        return f"{self.host} GPU {','.join(self.devices)} ({', '.join(self.hardware.gpus)})"


@dataclass(frozen=True)
class Refusal:
    """Why a replica could not be loaded."""

    host: str
    problems: list[str]  # sentences that say why it cannot serve
    settings: bool  # whether settings are at fault (ConfigError)


@dataclass(frozen=True)
class Orders:
    """The driver's call to a replica, which drops the requests of any run but this one."""

    run: int
    requests: list[Request] = field(default_factory=list)
    seconds: float = 0.25  # how long to wait for a finished answer
    halt: bool = False  # drop every request after the current step


@dataclass(frozen=True)
class ReplicaReport:
    """The requests that finished since the last report."""

    run: int
    outputs: list[RequestOutput]  # without their prompts, which the driver knows
    stats: EngineStats  # counts since the replica was made
    failure: str | None  # the traceback of what stopped the engine


def tokenizer_sha256(tokenizer: Any) -> str | None:
    """SHA-256 of everything that the tokenizer encodes and decodes by; None without a tokenizer."""
    return None if tokenizer is None else content_sha256(plain_tokenizer(tokenizer) or {})


class _Dropped(Exception):
    """Ends a run of the engine from its own thread."""


class Replica:
    """An `LLM` that a driver calls: first `load`, then `exchange`, which is all that a run needs. One call at a
    time."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._outputs: list[RequestOutput] = []
        self._run = 0
        self._open = 0  # requests that have no output yet
        self._halt = False
        self._failure: str | None = None

    def load(self) -> ReplicaFacts | Refusal:
        """Reads the weights and starts the engine."""
        spec = self._spec
        try:
            self.llm = LLM(
                resolve_checkpoint(spec.model),
                batch_invariant=spec.batch_invariant,
                numerics=spec.numerics,
                engine=spec.engine,
            )
        except ConfigError as error:
            return Refusal(socket.gethostname(), error.problems, True)
        except EvalEngineError as error:
            return Refusal(socket.gethostname(), [str(error)], False)
        threading.Thread(target=self._serve, name="engine", daemon=True).start()
        return self.facts()

    def facts(self) -> ReplicaFacts:
        """Describe this replica."""
        import ray

        llm, context = self.llm, ray.get_runtime_context()
        device = llm.settings.device
        return ReplicaFacts(
            host=socket.gethostname(),
            node=context.get_node_id(),
            pid=os.getpid(),
            devices=tuple(map(str, ray.get_gpu_ids())) if device.type == "cuda" else (),
            engine=llm.facts(),
            contract_version=llm.spec.contract_version,
            spec=llm.spec,
            stamp=llm.checkpoint.stamp,
            tokenizer=tokenizer_sha256(llm.tokenizer),
            hardware=Hardware(**machine_facts(str(device))["hardware"]),
        )

    def weights_sha256(self) -> str:
        """SHA-256 of the weight files on this machine; reads all of them."""
        return weights_fingerprint(self.llm.checkpoint)

    def exchange(self, orders: Orders) -> ReplicaReport:
        """Takes a lease, waits a little, and reports what has finished. Returns at once if nothing is left to do."""
        with self._changed:
            if orders.run != self._run or orders.halt:
                self._stop()
            if orders.run != self._run:
                self._run = orders.run
                self._outputs.clear()
            if orders.requests:
                self._queue.extend(orders.requests)
                self._open += len(orders.requests)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._outputs or self._failure or not self._open, orders.seconds)
            outputs, self._outputs = self._outputs, []
            return ReplicaReport(self._run, outputs, replace(self.llm.stats), self._failure)

    def reset_prefix_cache(self) -> None:
        """Ends the current run, then empties the prefix cache."""
        with self._changed:
            self._stop()
        self.llm.reset_prefix_cache()

    def _stop(self) -> None:
        """Drops every request; returns once the current step is over."""
        self._halt = True
        self._changed.wait_for(lambda: not self._open or self._failure)
        self._halt = False

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
            try:
                for output in self.llm.run(self._more(), more=self._more):
                    self._deliver(output)
            except _Dropped:
                continue
            except BaseException:
                with self._changed:
                    self._failure = traceback.format_exc()
                    self._changed.notify_all()

    def _more(self) -> list[Request]:
        """The requests leased since the last step. Raises `_Dropped` if they are to be dropped."""
        with self._changed:
            if self._halt:
                self._queue.clear()
                self._open = 0
                self._changed.notify_all()
                raise _Dropped
            lease = [*self._queue]
            self._queue.clear()
            return lease

    def _deliver(self, output: RequestOutput) -> None:
        with self._changed:
            self._outputs.append(replace(output, prompt_ids=[]))
            self._open -= 1
            self._changed.notify_all()
