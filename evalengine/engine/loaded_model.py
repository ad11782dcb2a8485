"""The parts of an engine in memory: the weights, the paged KV pool, the scheduler over it and the CUDA graphs.

It is loaded once from a checkpoint and settings; the pool and the scheduler can be built anew over the same weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from evalengine.config.check import no_model
from evalengine.config.schema import SCHEDULE_FIELDS, EngineConfig, ModelConfig
from evalengine.config.shipped import shipped_model
from evalengine.engine.execute.memory import memory_problems, plan_num_kv_blocks
from evalengine.engine.execute.model_runner import ModelRunner
from evalengine.engine.execute.parallel.group import share_memory, slot_bytes
from evalengine.engine.execute.parallel.ranks import Ranks
from evalengine.engine.execute.sharing import least_saved
from evalengine.engine.kv_layout import kv_layout
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.engine.protocol import EngineFacts, gpu_architecture
from evalengine.engine.schedule.block_manager import BlockManager
from evalengine.engine.schedule.drafts import Drafter
from evalengine.engine.schedule.scheduler import Scheduler
from evalengine.engine.schedule.snapshots import Snapshots
from evalengine.engine.settings import RECURRENT, Settings, resolve_settings, settings_problems
from evalengine.engine.states import NUM_SNAPSHOTS
from evalengine.engine.stats import EngineStats
from evalengine.engine.submission import RequestLimits, request_limits
from evalengine.errors import ConfigError
from evalengine.kernels.recurrent_variant import drops_guesses
from evalengine.layers import create_ops, verify_heads
from evalengine.layers.ops import Ops
from evalengine.models.causal_lm import CausalLM
from evalengine.util.libraries import installed_libraries
from evalengine.util.phases import note_compilations, phase

FIXED = ("device", "tensor_parallel_size", "self_test")  # the settings of loading
RECONFIGURABLE = tuple(name for name in SCHEDULE_FIELDS if name not in FIXED)  # the settings `_reconfigure` takes


ANY_POOL = 1 << 62  # pages: before memory is planned, no pool is too small


class LoadedModel:
    """A model on its devices, with its paged KV pool and its scheduler.

    load: False defers reading the weights to `_make`. What only loading shows (memory) is raised then.
    Raises ConfigError for a model that is not found or not supported and for settings that cannot be honoured, all at
    once.
    """

    loaded = False  # whether the weights are loaded, or were until the engine was closed
    num_kv_blocks: int | None  # pages of the pool; before it is planned, those that the settings ask for
    self_test_verdict: dict[str, Any] | None = None  # plain JSON values; None where no self-test was needed
    _layers: tuple[int, ...] | None = None  # those of the loaded model that a trial of the self-test has

    def __init__(
        self,
        model: str | ModelConfig | Checkpoint,
        config: EngineConfig,
        batch_invariant: bool,
        numerics: str,
        load: bool = True,
    ) -> None:
        self.config = config
        try:
            self.model_config = _model_config(model)
            self.checkpoint = model if isinstance(model, Checkpoint) else resolve_checkpoint(self.model_config)
        except ConfigError as error:
            others = settings_problems(self.config, batch_invariant, numerics, None)
            raise ConfigError([*error.problems, *others]) from error
        self.spec = self.checkpoint.spec
        self.tokenizer = self.checkpoint.tokenizer
        self.settings = resolve_settings(self.config, batch_invariant, numerics, self.spec)
        self.runner: ModelRunner | None = None
        self.stats = EngineStats()
        self.num_kv_blocks = config.num_kv_blocks
        self._kernels_verdicts: dict[int, dict[str, Any] | None] = {}  # block size -> `kernels_verdict`
        if load:
            self._make()

    def _make(self) -> None:
        """Load the weights and build the pool, unless that is done."""
        if self.loaded:
            return
        if problems := list(memory_problems(self.config, self.spec, self.settings)):
            raise ConfigError(problems)
        self._num_threads_before = torch.get_num_threads()
        torch.set_num_threads(self.settings.num_threads)
        self._ranks = Ranks(self.settings.devices)  # the other processes that share the model
        self.loaded = True
        try:
            self._load()
        except BaseException:
            self._release()
            self.loaded = False
            raise

    def _load(self) -> None:
        """Loads the weights and makes a KV pool in the memory that they leave."""
        note_compilations()
        settings = self.settings
        backend, tp = settings.attention_backend, self._ranks.tp
        ops = create_ops(settings.numerics, settings.dtype, settings.device, backend, tp)
        slot_size = slot_bytes(self.config, self.spec, ops)
        orders = replace(self.checkpoint, tokenizer=None), settings, slot_size

        def own() -> CausalLM:
            share_memory(ops, slot_size)
            return load_model(self.checkpoint, ops, settings.max_model_len)

        with phase("weights"):
            model, *_ = self._ranks.on_all_ranks("load", orders, own)
        self._verify(ops)
        self._test(model, ops)
        self._build(model, ops)

    def _test(self, model: CausalLM, ops: Ops) -> None:
        """Test the engine over the loaded model before its pool is made (`self_test`)."""

    def _verify(self, ops: Ops) -> None:
        """Verify the kernels for pages of this size, unless that is done."""
        size = self.settings.block_size
        if size not in self._kernels_verdicts:
            with phase("schedules"):
                verdicts = self._ranks.on_all_ranks(
                    "verify", (size,), lambda: verify_heads(ops, self.spec.every_shapes, size)
                )
            self._kernels_verdicts[size] = verdicts[0]

    def _build(self, model: CausalLM, ops: Ops, num_kv_blocks: int | None = None) -> None:
        """Makes the KV pool, the scheduler and the runner, once the kernels of this block size are verified.

        num_kv_blocks: pages of the pool; None plans them from the free memory.
        """
        settings = self.settings
        self._verify(ops)
        if num_kv_blocks is None:
            fitting = self._ranks.on_all_ranks(
                "plan", (self.config, settings), lambda: plan_num_kv_blocks(self.config, self.spec, settings)
            )
            num_kv_blocks = min(fitting)
        self.num_kv_blocks, self.kv_layout = num_kv_blocks, kv_layout(self.spec, settings)
        self.block_manager = self._new_block_manager()
        limits = self.config.max_num_seqs, self.config.max_num_batched_tokens
        # Without a drafter there are no guesses yet (`KNOWN_ANSWERS`), or nothing may be guessed.
        guesses = settings.speculation in ("auto", "always")
        drafter = Drafter(always=settings.speculation == "always") if guesses else None
        kinds = self.spec.recurrent_kinds
        assert settings.speculation in ("off", RECURRENT) or drops_guesses(kinds, chunked=ops.chunked)
        self.scheduler = Scheduler(self.block_manager, *limits, drafter=drafter, recurrences=kinds)
        longest = None if self.config.enforce_eager else settings.max_model_len
        least = least_saved(self.config, settings, self.spec)
        pool = self.kv_layout, self.num_kv_blocks, settings.block_size, self.config.max_num_seqs, longest, least
        runners = self._ranks.on_all_ranks(
            "build", (self._layers, *pool), lambda: ModelRunner(model, self.spec, ops, *pool, ranks=self._ranks)
        )
        self.runner = runners[0]

    def _new_block_manager(self) -> BlockManager:
        """An empty pool's."""
        config, groups = self.config, self.kv_layout.groups
        assert self.num_kv_blocks is not None, "the pool is planned"
        pool = self.num_kv_blocks, self.settings.block_size, config.enable_prefix_caching
        slots = self.config.max_num_seqs
        snapshots = Snapshots(range(slots, slots + NUM_SNAPSHOTS)) if self.spec.recurrences else None
        return BlockManager(*pool, groups, config.max_num_batched_tokens, snapshots)

    @property
    def kernels_verdict(self) -> dict[str, Any] | None:
        """The verdict of `verify_heads` for the current block size; None while no kernel has run."""
        return self._kernels_verdicts.get(self.settings.block_size)

    @property
    def limits(self) -> RequestLimits:
        """The bounds of the requests that can run; before memory is planned, without the pool's."""
        pages = self.num_kv_blocks or ANY_POOL
        return request_limits(self.spec, self.settings, self.config, pages, self.tokenizer is not None)

    def capture_graphs(self) -> None:
        """Captures the CUDA graphs of all usual decode steps now, which takes seconds; otherwise each is captured when
        its step is met. For a server or a measurement, whose steps should not wait for that."""
        assert self.runner is not None, "the engine is not closed"
        self.runner.capture_graphs()

    def facts(self) -> EngineFacts:
        """Return the engine's settings, device and limits; what only loading shows is None until then."""
        return EngineFacts(
            config=self.config,
            settings=self.settings,
            limits=self.limits,
            loaded=self.loaded,
            num_kv_blocks=self.num_kv_blocks,
            gpu_architecture=gpu_architecture(self.settings.device),
            libraries=installed_libraries(),
            kernels=self.kernels_verdict,
            self_test=self.self_test_verdict,
        )

    def _reconfigure(self, schedule: dict[str, Any]) -> None:
        """Builds the pool anew under other settings; the settings of before come back if that fails (ConfigError)."""
        assert self.runner is not None, "the engine is not closed"
        if fixed := sorted(set(schedule) - set(RECONFIGURABLE)):
            raise ConfigError(f"engine.{fixed[0]} is fixed once weights are loaded: make a new LLM")
        config = replace(self.config, **schedule)
        level = self.settings.numerics
        settings = resolve_settings(config, level != "fast", level, self.spec)
        if config.num_threads is None:
            settings = replace(settings, num_threads=self._num_threads_before)
        if settings.attention_backend != self.settings.attention_backend:
            raise ConfigError(
                f"engine.block_size={settings.block_size}: needs attention_backend={settings.attention_backend}, and "
                f"this LLM was made with {self.settings.attention_backend}: make a new one, or name the backend"
            )
        before = self.config, self.settings, self.num_kv_blocks
        model, ops = self.runner.model, self.runner.ops
        self.runner = None  # the old pool goes before the new one is made
        self._ranks.broadcast("drop")
        try:
            self._restart(model, ops, config, settings)
        except BaseException:  # only now is it known that no such pool fits, or that no kernel serves such pages
            self._restart(model, ops, *before)
            raise

    def _restart(
        self,
        model: CausalLM,
        ops: Ops,
        config: EngineConfig,
        settings: Settings,
        num_kv_blocks: int | None = None,
    ) -> None:
        self.config, self.settings, self.stats = config, settings, EngineStats()
        torch.set_num_threads(settings.num_threads)
        self._build(model, ops, num_kv_blocks)

    def _release(self) -> None:
        self.runner = None
        self._ranks.close()
        torch.set_num_threads(self._num_threads_before)
        if self.settings.device.type == "cuda":
            torch.cuda.empty_cache()


def _model_config(model: str | ModelConfig | Checkpoint) -> ModelConfig:
    """The configuration that finds the same model again."""
    if isinstance(model, str):
        return ModelConfig(**(shipped_model(model) or {"name": model, "path": model}))
    if isinstance(model, Checkpoint):
        return ModelConfig(
            path=model.source,
            revision=model.revision,
            load_format=model.format,
            implementation=model.spec.implementation,  # type: ignore[arg-type]  # native or transformers
            adapter=None if model.adapter is None else model.adapter.source,
            adapter_revision=None if model.adapter is None else model.adapter.revision,
        )
    if not isinstance(model, ModelConfig):
        raise ConfigError(no_model(model, "a path, a Hub id, a name of conf/model/, a ModelConfig or a Checkpoint"))
    return model
