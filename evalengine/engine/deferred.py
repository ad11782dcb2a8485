"""An engine whose weights are loaded when the first request runs: a run that computes nothing needs none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

from evalengine.config.schema import EngineConfig
from evalengine.engine.answering import EngineFacts, OnStep
from evalengine.engine.llm import LLM
from evalengine.engine.load.loader import Checkpoint
from evalengine.engine.request import Request, RequestOutput
from evalengine.engine.settings import resolve_settings
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import RequestLimits, request_limits
from evalengine.engine.warm_up import warm_up

if TYPE_CHECKING:
    from typing_extensions import Self

ANY_POOL = 1 << 62  # pages: before memory is planned, no pool is too small


class DeferredLLM:
    """An `LLM` that `load` or the first request makes; until then only what is known without weights can be asked.

    Raises: ConfigError for settings that cannot be honoured. What only loading shows (memory) is raised by `load`.
    """

    def __init__(self, checkpoint: Checkpoint, *, batch_invariant: bool, numerics: str, engine: EngineConfig) -> None:
        self.checkpoint, self.config = checkpoint, engine
        self._mode: Any = {"batch_invariant": batch_invariant, "numerics": numerics}
        self.spec, self.tokenizer = checkpoint.spec, checkpoint.tokenizer
        self.settings = resolve_settings(engine, batch_invariant, numerics, checkpoint.spec)
        self._llm: LLM | None = None
        self._answers: list[tuple[SequenceOf[int], SequenceOf[int]]] = []  # to be learned by the LLM to come

    @property
    def loaded(self) -> bool:
        """Whether there is an LLM yet."""
        return self._llm is not None

    def load(self) -> None:
        """Makes the LLM if there is none, and warms it up on a GPU. Raises ConfigError and EvalEngineError as `LLM`
        does."""
        if self._llm is None:
            llm = self.made()
            if self.settings.device.type == "cuda":
                warm_up(llm)

    def made(self) -> LLM:
        """The LLM, which `load` or this call makes."""
        if self._llm is None:
            self._llm = LLM(self.checkpoint, **self._mode, engine=self.config)
            self._llm.learn_answers(self._answers)
        return self._llm

    def facts(self) -> EngineFacts:
        """What answers depend on here; loads nothing, but may read all weight files for their hash."""
        return EngineFacts.here(self.checkpoint, self.settings.device)

    @property
    def limits(self) -> RequestLimits:
        """The bounds of the requests that can run, as far as they are known."""
        if self._llm is not None:
            return self._llm.limits
        pages = self.num_kv_blocks or ANY_POOL
        return request_limits(self.spec, self.settings, self.config, pages, self.tokenizer is not None)

    @property
    def num_kv_blocks(self) -> int | None:
        """Pages of the pool; None while there is no pool."""
        return self.config.num_kv_blocks if self._llm is None else self._llm.num_kv_blocks

    @property
    def stats(self) -> EngineStats:
        """The LLM's counters; all zero before there is one."""
        return EngineStats() if self._llm is None else self._llm.stats

    @property
    def kernels_verdict(self) -> dict[str, Any] | None:
        """`Engine.kernels_verdict`; None while no kernel has run."""
        return None if self._llm is None else self._llm.kernels_verdict

    @property
    def self_test_verdict(self) -> dict[str, Any] | None:
        """`Engine.self_test_verdict`; None while there is no engine."""
        return None if self._llm is None else self._llm.self_test_verdict

    def run(self, requests: Iterable[Request], on_step: OnStep = None) -> Iterator[RequestOutput]:
        """`Engine.run`, by an LLM that is made if there is none."""
        return self.made().run(requests, on_step)

    def learn_answers(self, answers: Iterable[tuple[SequenceOf[int], SequenceOf[int]]]) -> None:
        """`Engine.learn_answers`, once there is an engine."""
        if self._llm is None:
            self._answers += answers
        else:
            self._llm.learn_answers(answers)

    def reset_prefix_cache(self) -> None:
        """`Engine.reset_prefix_cache`, where there is an engine."""
        if self._llm is not None:
            self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Closes the LLM, if there is one."""
        if self._llm is not None:
            self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
