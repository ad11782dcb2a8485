"""The replicas: what each reserves; their actors, which are made, checked, called, and replaced when they die."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from evalengine.config.schema import Config
from evalengine.engine.load.loader import Checkpoint, Stamp, weights_fingerprint
from evalengine.engine.settings import on_gpu
from evalengine.integrations.ray.replica import (
    Orders,
    Refusal,
    Replica,
    ReplicaFacts,
    ReplicaReport,
    ReplicaSpec,
    tokenizer_sha256,
)
from evalengine.models.spec import ModelSpec, dtype_name
from evalengine.util.libraries import deciding
from evalengine.util.plugins import not_installed

REPLACED = 3  # times that a replica is made anew, on average, before the fleet is left to shrink
LOG_LINES = 15
REPLICA: type[Replica] = Replica  # the class that Ray makes actors of


@dataclass(frozen=True)
class Share:
    """The GPUs and cores that one replica reserves on its machine."""

    gpus: int  # 0: it computes on the CPU
    cpus: int


@dataclass(frozen=True)
class Event:
    """The state of a replica."""

    kind: Literal["joined", "refused", "lost", "report"]
    name: str
    facts: ReplicaFacts | None = None
    report: ReplicaReport | None = None
    why: str = ""
    problems: tuple[str, ...] = ()  # why settings cannot be honoured, if that is why it was refused


@dataclass
class ActorState:
    """One actor, and the call to it that is under way."""

    name: str
    actor: Any
    doing: Literal["load", "wait", "hash", "exchange", "idle"]
    call: Any = None  # Ray's reference to the call's result
    facts: ReplicaFacts | None = None


class Pool:
    """The replicas' actors on a connected Ray. Everything that happens to them happens in `poll`."""

    def __init__(
        self,
        spec: ReplicaSpec,
        share: Share,
        replicas: int,
        checkpoint: Checkpoint,
        logs: Path | None = None,
    ) -> None:
        """checkpoint: the driver's, which the plan is made with."""
        import ray

        self._ray, self._spec, self._share, self._logs = ray, spec, share, logs
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer_sha256(checkpoint.tokenizer)
        # Machine and stamp -> hash of the weight files; None stands for the driver's own files. A replica that replaces
        # a lost one may find other files in the same place.
        own = ray.get_runtime_context().get_node_id(), checkpoint.stamp
        self._known: dict[tuple[str, Stamp], str | None] = {own: None}
        self._made, self._left_to_make = 0, replicas * REPLACED
        self.first: ReplicaFacts | None = None  # the replica that joined first; the others must be like it
        self.members: dict[str, ActorState] = {}
        for _ in range(replicas):
            self._make()

    @property
    def coming(self) -> int:
        """How many replicas have not joined yet, and may."""
        return sum(member.doing in ("load", "wait", "hash") for member in self.members.values())

    def order(self, name: str, orders: Orders) -> None:
        """Sends orders to an idle replica."""
        member = self.members[name]
        assert member.doing == "idle", name
        member.call, member.doing = member.actor.exchange.remote(orders), "exchange"

    def idle(self) -> Iterator[str]:
        """The names of the replicas that no call is under way to."""
        return iter([name for name, member in self.members.items() if member.doing == "idle"])

    def poll(self, seconds: float) -> list[Event]:
        """Return the events since the last call; wait up to `seconds` for the first."""
        waiting = [member for member in self.members.values() if member.doing == "wait"]
        if checked := [event for member in waiting for event in self._check(member)]:
            return checked
        self._hash_files()
        calls = {member.call: member for member in self.members.values() if member.call is not None}
        if not calls:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait([*calls], num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait([*calls], num_returns=len(calls), timeout=0)
        return [event for call in ready for event in self._take(calls[call], call)]

    def remove(self, name: str, replace: bool) -> None:
        """Ends a replica; if `replace`, makes another, unless too many have been made."""
        member = self.members.pop(name)
        self._ray.kill(member.actor, no_restart=True)
        if replace and self._left_to_make > 0:
            self._left_to_make -= 1
            self._make()

    def close(self) -> None:
        """Ends all replicas."""
        for name in [*self.members]:
            self.remove(name, replace=False)

    def reset_prefix_cache(self) -> None:
        """Empties every loaded replica's prefix cache, after the call that is under way to it."""
        loaded = [member for member in self.members.values() if member.facts is not None]
        for call in [member.actor.reset_prefix_cache.remote() for member in loaded]:
            try:
                self._ray.get(call)
            except self._ray.exceptions.RayError:
                continue  # the replica is lost, as the next poll will say

    # -- one replica --------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        name = f"replica {self._made}"
        self._made += 1
        kind: Any = REPLICA
        actor = self._ray.remote(kind).options(
            num_cpus=self._share.cpus, num_gpus=self._share.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        handle = actor.remote(self._spec)
        self.members[name] = ActorState(name, handle, "load", handle.load.remote())

    def _take(self, member: ActorState, call: Any) -> Iterator[Event]:
        """Handles the result of a replica's call."""
        doing, member.call = member.doing, None
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            yield self._lost(member, *self._cause(error))
            return
        if doing == "load":
            yield from self._loaded(member, result)
        elif doing == "hash":
            assert member.facts is not None
            self._known[member.facts.files] = result
            member.doing = "wait"
        else:
            member.doing = "idle"
            assert isinstance(result, ReplicaReport)
            if result.failure is not None:
                yield self._lost(member, result.failure.strip().split("\n")[-1], result.failure)
            else:
                yield Event("report", member.name, report=result)

    def _loaded(self, member: ActorState, result: ReplicaFacts | Refusal) -> Iterator[Event]:
        if isinstance(result, Refusal):
            self.remove(member.name, replace=False)
            problems = tuple(result.problems) if result.settings else ()
            yield Event("refused", member.name, why=f"{result.host}: {'; '.join(result.problems)}", problems=problems)
            return
        member.facts, member.doing = result, "wait"
        yield from self._check(member)

    def _check(self, member: ActorState) -> Iterator[Event]:
        """Lets a loaded replica join if it is like the first and its weight files are the driver's; else refuses it."""
        facts = member.facts
        assert facts is not None
        problems = [*unlike(facts, self.first or facts, self._checkpoint.spec, self._tokenizer)]
        if not problems and facts.files not in self._known:
            return
        weights = self._known.get(facts.files)
        if not problems and weights is not None and weights != (ours := weights_fingerprint(self._checkpoint)):
            problems.append(f"its weights have the hash {weights[:12]}, the driver's {ours[:12]}")
        if problems:
            self.remove(member.name, replace=False)
            yield Event("refused", member.name, why=f"{facts.where}: {'; '.join(problems)}")
            return
        self.first = self.first or facts
        member.doing = "idle"
        yield Event("joined", member.name, facts=facts)

    def _hash_files(self) -> None:
        """Has one replica on each machine hash its weight files; those of the driver's machine are known."""
        waiting = [member for member in self.members.values() if member.doing == "wait" and member.facts is not None]
        busy = {member.facts.node for member in self.members.values() if member.doing == "hash" and member.facts}
        for member in waiting:
            assert member.facts is not None
            if member.facts.files not in self._known and member.facts.node not in busy:
                busy.add(member.facts.node)
                member.call, member.doing = member.actor.weights_sha256.remote(), "hash"

    def _lost(self, member: ActorState, why: str, log: str = "") -> Event:
        """Ends a lost replica and makes another. The event holds its log, which the event's receiver shows."""
        name, facts = member.name, member.facts
        self.remove(name, replace=True)
        return Event("lost", name, facts=facts, why=f"{why}\n{log}".strip() if log else why)

    def _cause(self, error: Exception) -> tuple[str, str]:
        """(why a replica does not answer, the end of its log)."""
        text = str(error)
        detail = re.search(r"Worker exit detail: (.+)", text) or re.search(r"The actor is dead because (.+)", text)
        why = " ".join((detail[1] if detail else text.strip().split("\n")[-1]).split())[:200]
        pid = re.search(r"pid: (\d+)", text)
        files = [*self._logs.glob(f"worker-*-{pid[1]}.err")] if pid and self._logs is not None else []
        lines = [line for file in files for line in file.read_text(errors="replace").splitlines() if line.strip()]
        return why, "\n".join(lines[-LOG_LINES:])


def ray_problems(config: Config) -> Iterator[str]:
    """Yield what this machine lacks for the run's replicas, a sentence each. `cluster_share` checks a Ray cluster
    elsewhere, once it is joined."""
    cluster = config.cluster
    if missing := not_installed("ray", "ray"):
        setting = "cluster=ray" if cluster.backend == "ray" else "cluster.replicas=auto on a machine with several GPUs"
        yield f"{setting}: {missing}, or set cluster=local cluster.replicas=1"
    replicas = cluster.replicas
    if cluster.address is None and replicas != "auto" and on_gpu(config.engine):
        each, present = config.engine.tensor_parallel_size, torch.cuda.device_count()
        needed = replicas * each
        if needed > present:
            yield (
                f"cluster.replicas={replicas}: needs {needed} GPUs ({each} a replica), and this "
                f"machine has {present}; lower it, or name a cluster by cluster.address"
            )


def local_share(config: Config, replicas: int, cpus: int) -> Share:
    """Return a replica's share of this machine, whose processors the replicas share."""
    if on_gpu(config.engine):
        return Share(config.engine.tensor_parallel_size, 1)
    return Share(0, config.engine.num_threads or max(1, cpus // replicas))


def cluster_share(config: Config, nodes: list[dict[str, float]]) -> tuple[Share, int]:
    """(what a replica reserves, how many there are) on a Ray cluster whose machines have these resources.

    Raises ValueError, a sentence, if no machine has room for one.
    """
    device, configured = config.engine.device, config.cluster.replicas
    gpus = config.engine.tensor_parallel_size
    if device.startswith("cuda") or (device == "auto" and any(node.get("GPU", 0) for node in nodes)):
        room = sum(int(node.get("GPU", 0)) // gpus for node in nodes)
        if not room:
            raise ValueError(f"no machine of it has the {gpus} GPUs that a replica needs")
        return Share(gpus, 1), room if configured == "auto" else int(configured)
    cpus = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    if not cpus:
        raise ValueError("no machine of it offers a CPU")
    replicas = len(cpus) if configured == "auto" else int(configured)
    threads = config.engine.num_threads or max(1, min(min(cpus), sum(cpus) // replicas))
    if threads > max(cpus):
        raise ValueError(f"no machine of it has the {threads} CPUs of engine.num_threads")
    return Share(0, threads), replicas


def unlike(facts: ReplicaFacts, first: ReplicaFacts, spec: ModelSpec, tokenizer: str | None) -> Iterator[str]:
    """The facts in which a replica differs from the driver (the model's spec, the tokenizer's hash) or from the first
    replica, though answers depend on it; a sentence each."""
    ours, engine, wanted = spec.contract_version, facts.engine, first.engine
    if facts.contract_version != ours:
        yield f"its contract version is {facts.contract_version}, the driver's {ours}"
    if facts.spec != spec:
        yield "its model's configuration is not the driver's"
    if facts.tokenizer != tokenizer:
        yield "its tokenizer is not the driver's"
    for name in ("numerics", "dtype", "max_model_len", "attention_backend"):
        own, expected = getattr(engine.settings, name), getattr(wanted.settings, name)
        if own != expected:
            own, expected = (dtype_name(own), dtype_name(expected)) if name == "dtype" else (own, expected)
            yield f"its {name} is {own}, that of {first.where} is {expected}"
    if engine.settings.numerics == "native" and engine.gpu_architecture != wanted.gpu_architecture:
        yield f"its GPU is {engine.gpu_architecture}, that of {first.where} is {wanted.gpu_architecture}"
    for name in deciding(engine.settings.numerics):
        if engine.libraries[name] != wanted.libraries[name]:
            yield f"its {name} is {engine.libraries[name]}, that of {first.where} is {wanted.libraries[name]}"
