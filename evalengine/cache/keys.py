"""Keys of the cache: 32 bytes that stand for everything that an answer depends on.

Two halves. *Who computes*: the contract version, the weights by content, every field of the model's spec (with the
end-of-sequence ids and the logits processors of its generation configuration), numerics level and dtype. `exact` is the
same on every machine; `native` on one GPU architecture, and since no test compares what two compilers make of a kernel,
its key also holds the versions of torch, CUDA and Triton. Kernel schedules that failed verification are not in the key:
those that run give the bits of the reference. A generation's key also holds the tokenizer, with the version of its
library, since stop strings are found in text.

*What is asked*: the token ids, how many alternatives are kept, and for a generation everything in force that chooses or
ends its tokens: the room that `max_model_len` leaves, stop strings and ids, processors, and where noise is
drawn (temperature above 0) its seed and name. Tasks, documents, limits, orders, batches and pages are in neither half.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evalengine.engine.request import GenerateRequest, Request, ScoreRequest
from evalengine.models.spec import ModelSpec
from evalengine.records.schema import packed_ids
from evalengine.records.sealed import canonical
from evalengine.util.libraries import NATIVE_LIBRARIES, TEXT_LIBRARIES

VERSION = 1  # the keys' version: answers kept under another one are not found
# The keys of a run's identity on which its answers depend.
COMPUTING = ("contract_version", "weights", "model_spec", "numerics", "dtype", "gpu_architecture")


@dataclass(frozen=True)
class Computer:
    """The model and machine that compute. `scoring` and `generating` stand for them in the keys of either kind."""

    facts: Mapping[str, Any]  # shown by `evalengine cache`
    scoring: bytes  # SHA-256 of what the keys of scores depend on
    generating: bytes  # SHA-256 of what the keys of generations depend on

    @classmethod
    def of(cls, name: str, identity: Mapping[str, Any], versions: Mapping[str, str | None]) -> Computer:
        """name: what the model is called; it changes no key. identity: a run's, or what `engine_identity` gives.
        versions: those of the libraries where the answers are computed (`util.libraries`)."""
        assert identity["numerics"] in ("exact", "native"), "fast numerics' answers depend on the batch"
        facts = {key: identity[key] for key in COMPUTING if key in identity}
        if identity["numerics"] == "native":
            assert "gpu_architecture" in facts
            facts["libraries"] = {library: versions.get(library) for library in NATIVE_LIBRARIES}
        text = {library: versions.get(library) for library in TEXT_LIBRARIES}
        generating = {**facts, "tokenizer": identity["tokenizer"], "text_libraries": text}
        return cls({"name": name, **generating}, _sha256("score", facts), _sha256("generate", generating))


class Keys:
    """The keys of requests to one engine."""

    def __init__(self, computer: Computer, spec: ModelSpec, max_model_len: int) -> None:
        self._computer, self._spec, self._max_model_len = computer, spec, max_model_len

    def of(self, request: Request) -> bytes:
        """The request's key, 32 bytes."""
        if isinstance(request, ScoreRequest):
            return self._joined(
                self._computer.scoring,
                request.logprobs.to_bytes(8, "little"),
                packed_ids(request.context_ids),
                packed_ids(request.continuation_ids),
            )
        return self._joined(self._computer.generating, self._generation(request), packed_ids(request.prompt_ids))

    def _generation(self, request: GenerateRequest) -> bytes:
        """Everything that determines a generation except its prompt, as canonical JSON."""
        params, room = request.params, self._max_model_len - len(request.prompt_ids)
        asked: dict[str, Any] = {
            "max_tokens": min(params.max_tokens, room),
            "stop": params.stop,
            "end_ids": sorted(self._spec.eos_token_ids if params.stop_token_ids is None else params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "think_end_token": params.think_end_token,
            "logprobs": params.logprobs,
            "temperature": params.temperature,
            "processors": asdict(self._spec.processors if params.processors is None else params.processors),
        }
        if params.temperature > 0:
            sampling = {"top_k": params.top_k, "top_p": params.top_p, "seed": params.seed, "sample": request.sample}
            asked |= {**sampling, "noise_key": params.noise_key}
        return canonical(asked).encode()

    @staticmethod
    def _joined(*parts: bytes) -> bytes:
        lengths = array("q", map(len, parts))
        return hashlib.sha256(b"".join([lengths.tobytes(), *parts])).digest()


def _sha256(kind: str, facts: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(canonical({"version": VERSION, "kind": kind, **facts}).encode()).digest()
