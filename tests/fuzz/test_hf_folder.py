"""Every field of a folder's JSON files is given values that it cannot have: the folder is refused with a sentence, or
the model is what transformers makes of the same files."""

from __future__ import annotations

import functools
import json
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from evalengine.config.schema import ModelConfig
from evalengine.engine.load.loader import Checkpoint, load_model, resolve_checkpoint
from evalengine.engine.text.encode import encode
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.layers import create_ops
from tests.engine.tied_folder import sizes
from tests.engine.tied_folder import tokenizer as word_tokenizer
from tests.fuzz.cases import Case, cases
from tests.parity.paged import PagedRunner

SECONDS = 30  # allowed for one folder, which takes a fraction of a second
GIGABYTE = 1 << 30
REMOVED = object()
RAW = {"<deep>": "[" * 1000 + "]" * 1000, "<deeper>": "[" * 100_000, "<digits>": "9" * 5000, "<huge>": "1e999"}
VALUES: list[Any] = [
    *(REMOVED, None, True, False, "", "x", "\ud800", -1, 0, 1, 3, 10**9, 2**70, 0.5, -2.0),
    *(float("inf"), float("-inf"), float("nan"), [], [None], [1, [2]], ["x"] * 3, {}, {"x": 1}, {"__float__": "NaN"}),
    *RAW,
]
IDS = [3, 1, 4, 1, 5, 9]
TEXT = "t3 t4, t1 t2 t30"
INDEX = "model.safetensors.index.json"


def make_folder(path: Path) -> Path:
    """A tiny Qwen3 in two shards, with every JSON file that such a folder has and its fields at the usual values."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes(23, 16, 24, 2, 2, 1),
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(path)
    GenerationConfig(eos_token_id=[5, 7], pad_token_id=0).save_pretrained(path)
    (path / "special_tokens_map.json").write_text('{"bos_token": "t1", "eos_token": {"content": "t2"}}')
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({n: tensors[n] for n in names if places[n] == file}, path / file, metadata={"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    more = {"num_labels": 2, "is_causal": True, "quantization_config": None, "sliding_window": None, "rope_theta": 1e4}
    config_file = path / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **more}))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hf") / "model")


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places where a value can be exchanged: every key of every object, and the first item of every list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places_in(inner, (*path, key))


def mutated(text: str, place: tuple[Any, ...], value: Any) -> str:
    """The JSON text with the value at the place replaced or removed."""
    content = json.loads(text)
    parent = functools.reduce(lambda inner, key: inner[key], place[:-1], content)
    if value is REMOVED:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    result = json.dumps(content)
    for name, raw in RAW.items():
        result = result.replace(f'"{name}"', raw)
    return result


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TimeoutError inside after `SECONDS`."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def opened(path: Path) -> tuple[Checkpoint, Tensor] | None:
    """The model and its logits; None if it was refused, by sentences that a terminal can show."""
    try:
        with in_time():
            checkpoint = resolve_checkpoint(ModelConfig(name="t", path=str(path)))
            model = load_model(checkpoint, create_ops("exact", torch.float32, torch.device("cpu")), 16)
            assert checkpoint.tokenizer is not None
            encode(checkpoint.tokenizer, "t3 t4")
            return checkpoint, PagedRunner(model).step({"s": IDS})["s"]
    except (ConfigError, EvalEngineError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        assert all(s.isprintable() and s.strip() and len(s) < 1500 for s in problems), problems
        str(error).encode()
        return None


def by_transformers(path: Path) -> tuple[list[int], Tensor] | None:
    """transformers' end tokens and logits; None where it fails, as it may on what evalengine refuses by default."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([IDS])).logits[0]
    except Exception:
        return None
    eos = model.generation_config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or ()), logits


def recorded(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What a run's identity holds of the model, besides its weights."""
    tokenizer: Any = checkpoint.tokenizer
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    around = tokenizer.clean_up_tokenization_spaces, tokenizer.split_special_tokens, tokenizer.chat_template
    return checkpoint.spec, tokenizer.backend_tokenizer.to_str(), special, *around


def as_used(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What must be equal where the records are: token ids, texts and the prompt."""
    tokenizer: Any = checkpoint.tokenizer
    ids = encode(tokenizer, TEXT)
    chat = tokenizer.chat_template and tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXT}], tokenize=False
    )
    return ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True), chat


def check(path: Path, file: str, text: str, unmutated: tuple[Any, ...]) -> bool:
    """Whether the folder with this content of the file was accepted."""
    original = (path / file).read_bytes()
    (path / file).write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        outcome = opened(path)
        if outcome is None:
            return False
        checkpoint, logits = outcome
        if recorded(checkpoint) == unmutated[0]:
            assert torch.equal(logits, unmutated[1]) and as_used(checkpoint) == unmutated[2], (
                "unseen by a run's identity"
            )
        if file.startswith(("tokenizer", "special")) or (reference := by_transformers(path)) is None:
            return True
        assert list(checkpoint.spec.eos_token_ids) == list(dict.fromkeys(reference[0]))
        assert torch.allclose(logits, reference[1], atol=1e-5), "other logits than transformers'"
        return True
    finally:
        (path / file).write_bytes(original)


def fields(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """File -> the places of its values."""
    return {file.name: list(places_in(json.loads(file.read_text()))) for file in sorted(folder.glob("*.json"))}


def test_fields_with_impossible_values_are_refused_or_read_alike(folder: Path, tmp_path: Path) -> None:
    where = fields(folder)
    path = shutil.copytree(folder, tmp_path / "model")
    first = opened(path)
    assert first is not None
    unmutated = recorded(first[0]), first[1], as_used(first[0])
    weights = {"config.json": 8, "generation_config.json": 2, INDEX: 2}
    refused, memory = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in cases("hf_folder", 60):
        file = case.choices(list(where), [weights.get(name, 1) for name in where])[0]
        place, value = case.choice(where[file]), case.choice(VALUES)
        with case.named((file, place, "removed" if value is REMOVED else value)):
            refused += not check(path, file, mutated((path / file).read_text(), place, value), unmutated)
    assert refused
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < GIGABYTE  # Linux counts in KiB


def test_whole_files_of_another_kind_are_refused_or_read(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    contents = ["", "null", "[]", "3", '"x"', "{", "\ufeff{}", '{"a": ' * 2000, *RAW.values()]
    for case in cases("hf_folder/files", 12):
        file, text = case.choice(sorted(fields(folder))), case.choice(contents)
        with case.named((file, text[:20])):
            check(path, file, text, ((), None, ()))


def test_damaged_headers_are_refused_or_give_the_same_weights(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder, tmp_path / "model")
    shard = path / "model-00001-of-00002.safetensors"
    original = shard.read_bytes()
    first = opened(path)
    assert first is not None
    for case in cases("hf_folder/headers", 30):
        shard.write_bytes(damaged_header(case, original))
        with case.named(shard.read_bytes()[8:200]):
            outcome = opened(path)
            assert outcome is None or torch.equal(outcome[1], first[1]), "other weights"


def damaged_header(case: Case, content: bytes) -> bytes:
    """The shard cut short, or with a wrong size, value or character in its header."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + size].decode(), content[8 + size :]
    kind = case.randrange(4)
    if kind == 0:
        return content[: case.randrange(len(content))]
    if kind == 1:
        return struct.pack("<Q", case.choice([0, 1, size - 1, size + 1, 10**8, 2**63])) + content[8:]
    if kind == 2:
        place, value = case.choice(list(places_in(json.loads(header)))), case.choice(VALUES[:-4])
        header = mutated(header, place, "x" if value == "\ud800" else value)
    else:
        at = case.randrange(len(header))
        header = header[:at] + chr(case.randrange(32, 127)) + header[at + 1 :]
    return struct.pack("<Q", len(header)) + header.encode() + data


if __name__ == "__main__":  # this tries every value in every field of the files that are named: minutes
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        source = make_folder(Path(temporary) / "model")
        begin = opened(source)
        assert begin is not None
        known = recorded(begin[0]), begin[1], as_used(begin[0])
        for name in sys.argv[1:]:
            for at in fields(source)[name]:
                for new in VALUES:
                    label = f"{name} {at} {'removed' if new is REMOVED else new!r}"
                    try:
                        if check(source, name, mutated((source / name).read_text(), at, new), known):
                            print("accepted", label, flush=True)
                    except BaseException as error:
                        print("FAILED", label, type(error).__name__, str(error)[:300], flush=True)
