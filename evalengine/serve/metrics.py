"""What `/metrics` tells, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from evalengine.engine.stats import EngineStats
from evalengine.engine.thread import EngineThread

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of the requests, and the engine's own."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = CollectorRegistry()
        of = self._registry
        self.requests = Counter("evalengine_requests", "Requests", ["path", "status"], registry=of)
        self.seconds = Histogram("evalengine_request_seconds", "From a request's head to its answer, or its answer's "
                                 "beginning", ["path"], buckets=SECONDS, registry=of)  # fmt: skip
        self.tokens = Counter("evalengine_tokens", "Tokens of prompts and answers", ["kind"], registry=of)
        self.gone = Counter("evalengine_clients_gone", "Requests whose client left before the answer", registry=of)
        self._registry.register(_EngineGauges(engine))

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)


class _EngineGauges(Collector):
    """The engine's state at the moment of the question."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        scheduler, stats = engine.engine.scheduler, engine.engine.stats
        now = {
            "requests_open": (engine.num_open, "Choices and scores without an answer yet"),
            "sequences_running": (len(scheduler.running), "Sequences that hold pages"),
            "sequences_waiting": (len(scheduler.waiting), "Sequences that wait for room"),
            "kv_pages_free": (scheduler.block_manager.num_free_blocks, "Pages of the KV pool that are free"),
        }
        for item in fields(EngineStats):
            now[f"engine_{item.name}"] = (getattr(stats, item.name), "The engine's own counter since it was loaded")
        for name, (value, meaning) in now.items():
            yield GaugeMetricFamily(f"evalengine_{name}", meaning, value)
