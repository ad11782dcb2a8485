"""Switches the overrides on and off, for the whole process.

`_settings` is a stack of what was requested and not yet withdrawn: plain calls of `set_batch_invariant_mode` and the
`with` blocks that are active in any thread or asyncio task. The last item is in force. A block removes its item when it
is left, wherever the item is in the stack, so blocks of several threads may end in any order.

Blocks of different threads or tasks that are active at the same time must have the same settings, since one of them
would otherwise compute in the other's mode. A thread (or task) whose blocks are the only active ones may nest any
settings.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel

from evalengine.errors import ConfigError
from evalengine.invariant.cpu import CPUOverrides
from evalengine.invariant.overrides import Overrides
from evalengine.invariant.prepared import DEFAULT_LIMIT, PreparedWeights
from evalengine.kernels.torch_private import destroy

Function = TypeVar("Function", bound=Callable[..., Any])
_Owner = tuple[int, int]  # the ids of a thread and of its asyncio task (0 outside of tasks)


class set_batch_invariant_mode:
    """Turns the mode on (or off) at once, for the whole process, as `torch.set_grad_enabled` does for gradients.

    After a plain call the mode stays until the next call. As a context manager it restores the former mode on leaving,
    also after an exception, so calls nest in any way: `set_batch_invariant_mode(False)` inside a `True` turns the mode
    off there. An object may be entered again, also while it is active. Blocks of several threads or asyncio tasks may
    overlap: the last one to leave restores the mode. Raises `ConfigError` where a call or a block would change the
    settings of a block that is active in a different thread or task.

    As a decorator (`@set_batch_invariant_mode()`) it puts each call of a function, a method or a coroutine function
    into such a block. Raises `ConfigError` for generator functions, which would leave the mode on in the code that
    iterates over them, and for classes.

    It is meant for inference; under autograd each covered op keeps torch's own gradient formula. Raises `ConfigError`
    inside a function under `torch.compile`: a compiler cannot trace the call that switches it off.

    `weight_cache_bytes` bounds the memory for weights that the CPU side has prepared (2 GiB by default; 0 keeps none):
    12 bytes a float32 weight, 10 a bf16 or fp16 one. Weights beyond it are prepared at every call, to the same bits.
    None leaves the bound as it is, and leaving the context puts back the former one. Raises `ConfigError` if it is no
    number of bytes. With `keep_weights` they outlive the context, for a caller that enters it again and again; each
    goes when its weight does, and all of them when the mode is next turned off without it.
    """

    def __init__(
        self, enabled: bool = True, *, weight_cache_bytes: int | None = None, keep_weights: bool = False
    ) -> None:
        if type(enabled) is not bool:
            raise ConfigError(
                f"set_batch_invariant_mode({enabled!r:.60}): give True or False (a decorator needs parentheses: "
                "@set_batch_invariant_mode())"
            )
        if weight_cache_bytes is not None and (type(weight_cache_bytes) is not int or weight_cache_bytes < 0):
            raise ConfigError(
                f"set_batch_invariant_mode(weight_cache_bytes={weight_cache_bytes!r:.60}): "
                "give a number of bytes, 0 or more"
            )
        self._enabled, self._limit, self._keep_weights = enabled, weight_cache_bytes, keep_weights
        self._request(is_block=False)  # a plain call, until `__enter__` or `__call__` shows that it is none

    def __enter__(self) -> None:
        self._request(is_block=True)

    def __exit__(self, *_: object) -> None:
        with _lock:
            settings, owner = tuple(_settings), _current_owner()
            mine = [setting for setting in settings if setting.source() is self]
            # A generator's block, for example, may be left by a different thread or task than entered it.
            left = next((setting for setting in reversed(mine) if setting.owner == owner), mine[-1] if mine else None)
            if left is not None:
                after = settings[settings.index(left) + 1 :] if left.is_block else ()
                for setting in (left, *(s for s in after if s.owner == left.owner and not s.is_block)):
                    _remove(setting)
            _apply(self._keep_weights)

    def __call__(self, function: Function) -> Function:
        with _lock:
            self._withdraw_call()
            _apply()
        name = getattr(function, "__qualname__", repr(function)[:60])
        if not callable(function) or inspect.isclass(function) or isinstance(function, (staticmethod, classmethod)):
            raise ConfigError(
                f"@set_batch_invariant_mode() on {name}: decorate a function or a method, below @staticmethod and "
                "@classmethod; of a class decorate the methods"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"@set_batch_invariant_mode() on {name}, a generator function: its callers would run in the mode, too; "
                "decorate the function that it computes with, or enter the mode between two yields"
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast(Function, run_coroutine)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(Function, run)

    def _request(self, is_block: bool) -> None:
        """Put the settings in force. Raises ConfigError, with nothing changed, where a different thread's or task's
        block has other settings."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # without it some versions trace the error, give up, and run this again
            raise ConfigError("set_batch_invariant_mode() cannot be compiled: enter it outside the compiled function")
        with _lock:
            if is_block:
                self._withdraw_call()
            owner = _current_owner()
            is_inside = any(setting.owner == owner for setting in tuple(_settings))
            setting = _Setting(
                self._enabled, self._limit, weakref.ref(self), is_block, owner if is_block or is_inside else None
            )
            try:
                setting.check(owner)
                _merge_plain_calls()
                _settings.append(setting)
                _apply()
            except BaseException:
                _remove(setting)
                _apply()
                raise

    def _withdraw_call(self) -> None:
        """Undo the plain call that making this object was, unless that is done."""
        for setting in tuple(_settings):
            if setting.source() is self and not setting.is_block:
                _remove(setting)


@dataclass(eq=False)
class _Setting:
    """The mode that one plain call or one block requests."""

    enabled: bool
    limit: int | None  # bytes of prepared weights; None: as before
    source: Callable[[], set_batch_invariant_mode | None]  # None once the object is gone: then it stays a plain call
    is_block: bool
    owner: _Owner | None  # whose block this is, or inside whose block it was called; None: a plain call outside

    def check(self, owner: _Owner) -> None:
        """Raises ConfigError if a block of a different owner has other settings."""
        for other in tuple(_settings):
            agrees = other.enabled == self.enabled and (None in (self.limit, other.limit) or other.limit == self.limit)
            if other.owner not in (None, owner) and not agrees:
                raise ConfigError(
                    f"{self}: a different thread or asyncio task is inside {other}, and the mode is one for the whole "
                    "process: give both the same settings, or wait until that block is left"
                )

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", weight_cache_bytes={self.limit}"
        return f"set_batch_invariant_mode({self.enabled}{limit})"


_settings = [_Setting(False, DEFAULT_LIMIT, lambda: None, is_block=False, owner=None)]
# Held wherever `_settings` is used. Reentrant: the garbage collector may end a generator that is suspended in a block
# while this thread holds the lock. So `_settings` is read as a copy, and changed by single appends and removals.
_lock = threading.RLock()
_is_applying = False
_installed: ExitStack | None = None  # the overrides in place; closing it puts torch back as it was
_weights = PreparedWeights()  # the CPU side's weights; empty while the mode is off


def is_batch_invariant_mode() -> bool:
    """Whether the overrides are in place now."""
    return _installed is not None


def _current_owner() -> _Owner:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.get_ident(), 0 if task is None else id(task)


def _remove(setting: _Setting) -> None:
    with suppress(ValueError):  # the garbage collector was faster, see `_lock`
        _settings.remove(setting)


def _merge_plain_calls() -> None:
    """Remove the second last setting if it and the last one will stay plain calls, so that these do not pile up."""
    if len(settings := tuple(_settings)) > 1:
        former, last = settings[-2:]
        stay = not (former.is_block or former.source() or last.is_block or last.source())
        if stay and former.owner == last.owner:
            last.limit = former.limit if last.limit is None else last.limit
            _remove(former)


def _apply(keep_weights: bool = False) -> None:
    """Install or remove the overrides, as the last setting says. Idempotent.

    keep_weights: whether prepared weights outlive the overrides.
    """
    global _installed, _is_applying
    if _is_applying:  # called by the garbage collector (see `_lock`); the outer call sees the changed settings
        return
    _is_applying = True
    try:
        while _settings[-1].enabled != is_batch_invariant_mode():
            if _settings[-1].enabled:
                _installed = _install()
            elif _installed is not None:
                installed, _installed = _installed, None
                installed.close()
                if not keep_weights:
                    _weights.clear()
        _weights.limit = next(setting.limit for setting in reversed(_settings) if setting.limit is not None)
    finally:
        _is_applying = False


def _install() -> ExitStack:
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        library = Library("aten", "IMPL")
        stack.callback(destroy, library)
        for overrides in _devices():
            _register(library, overrides)
        return stack.pop_all()


def _devices() -> list[Overrides]:
    devices: list[Overrides] = [CPUOverrides(_weights)]
    if torch.cuda.is_available():
        from evalengine.invariant.cuda import CUDAOverrides  # imports Triton

        devices.append(CUDAOverrides())
    return devices


def _register(library: Library, overrides: Overrides) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        for name, kernel in overrides.kernels().items():
            library.impl(name, kernel, overrides.device.upper())
        for name, kernel in overrides.autograd_kernels().items():
            library.impl(name, kernel, f"Autograd{overrides.device.upper()}")
