"""A small random model with a real tokenizer: enough to drive the engine in seconds."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

import pytest
import torch

from evalengine import LLM
from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, resolve_checkpoint

if TYPE_CHECKING:
    from tests.parity.random_models import ModelFolders

# A process that forks a rank for each message, which has the rank's arguments, environment, socket and log.
FORKING = """
import json, os, signal, socket, sys
from evalengine.engine.execute.parallel.worker import main
requests = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that have ended are no zombies
while True:
    message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 2)
    if not message:
        sys.exit()
    descriptor, log = descriptors
    if (pid := os.fork()) == 0:
        break
    os.close(descriptor), os.close(log), requests.send(str(pid).encode())
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
requests.close(), os.setsid(), os.dup2(log, 1), os.dup2(log, 2)
(rank, size, folder), environment = json.loads(message)
os.environ.clear(), os.environ.update(environment)
sys.argv[1:] = [str(descriptor), rank, size, folder]
main()
"""


class ForkedRank:
    """What `Ranks` uses of a `subprocess.Popen`, for a forked rank. The exit code is not known."""

    def __init__(self, forking: socket.socket, words: list[str], env: dict[str, str], fd: int, log: IO[bytes]) -> None:
        message = json.dumps([words[-3:], env]).encode()
        socket.send_fds(forking, [message], [fd, log.fileno()])
        self.pid = int(forking.recv(100))
        self._end = Connection(os.pidfd_open(self.pid))

    def wait(self, timeout: float | None = None) -> int:
        if not self._end.poll(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end.fileno(), signal.SIGKILL)


@pytest.fixture(scope="session")
def _forking() -> Iterator[socket.socket]:
    """The socket of a process that has imported what a rank needs, and forks ranks."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here:
        command = [sys.executable, "-c", FORKING, str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)
        there.close()
        yield here
    try:
        process.wait(20)
    finally:
        process.kill()


@pytest.fixture
def forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks ranks from a process that has imported torch, which saves two seconds of CPU for each; not on GPUs."""
    if torch.cuda.is_available() or not hasattr(os, "pidfd_open"):
        return
    forking: socket.socket = request.getfixturevalue("_forking")

    def start(words: list[str], *, env: dict[str, str], pass_fds: list[int], stdout: IO[bytes], **_: Any) -> ForkedRank:
        return ForkedRank(forking, words, env, *pass_fds, stdout)

    names = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("evalengine.engine.execute.parallel.ranks.subprocess", names)


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint of two layers, GQA 2, q/k norm and seeded random weights, with tinymath's tokenizer."""
    asset = Path(str(files("evalengine.assets") / "tinymath"))
    folder = tmp_path_factory.mktemp("small")
    config = json.loads((asset / "config.json").read_text())
    config.update(num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=32, max_position_embeddings=512)
    config.pop("layer_types", None)
    config["max_window_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((asset / name).read_text())
    checkpoint = resolve_checkpoint(ModelConfig(name="small", path=str(folder), load_format="dummy"))
    assert checkpoint.tokenizer is not None
    return dataclasses.replace(checkpoint)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ModelFolders:
    """The tiny model of each family (`tests.parity.families.CASES`), each made when it is first asked for."""
    from tests.parity.families import make  # imports transformers' models, which few files need
    from tests.parity.random_models import ModelFolders

    return ModelFolders(make, tmp_path_factory)


@pytest.fixture
def make_llm(small_checkpoint: Checkpoint) -> Iterator[Callable[..., LLM]]:
    """Makes `LLM(small_checkpoint, ...)` with a small pool, and closes each at the end of the test."""
    llms: list[LLM] = []

    def make(**settings: object) -> LLM:
        settings.setdefault("num_kv_blocks", 256)
        settings.setdefault("block_size", 16)
        llms.append(LLM(small_checkpoint, **settings))  # type: ignore[arg-type]
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


@pytest.fixture
def llm(make_llm: Callable[..., LLM]) -> LLM:
    """The small model in fast mode, float32."""
    return make_llm(batch_invariant=False, dtype="float32")
