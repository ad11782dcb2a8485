"""One field of a published config.json is changed: the model is transformers' of the same file, natively or by its own
module with a line that says so, or the file is refused in a sentence that names fields of it."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from evalengine.engine.load.hf_folder import folder_spec
from evalengine.errors import ConfigError, EvalEngineError
from evalengine.models.hf_config import from_hf, spec_from_json
from tests.fuzz.cases import Case, cases
from tests.fuzz.test_hf_folder import REMOVED, VALUES, in_time, mutated, places_in
from tests.parity.families import saved_random
from tests.parity.published import PUBLISHED, family_of, tiny
from tests.parity.test_published import ACCEPTED, logprobs_of_both, read_by_transformers

NATIVE = [name for name in ACCEPTED if family_of(PUBLISHED[name]) is not None]
PARTS = ("bos_token_id", "eos_token_id", "tie_word_embeddings")  # the whole's are those of its text part
# Values with which a tiny model stays tiny; fields that keep theirs: sizes, dtypes, and where long contexts begin.
SMALL: list[Any] = [REMOVED, None, True, False, 0, 1, 2, 3, 0.5, -2.0, 1e-3, 10.0, "x", "gelu", [], {}]
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "initializer_range"),
    *("original_max_position_embeddings", "architectures", "model_type", "dtype", "torch_dtype"),
)


def changed(case: Case, raw: dict[str, Any], values: list[Any], kept: tuple[str, ...] = ()) -> tuple[Any, str]:
    """(what was changed, the file's text): a value for one that it cannot have, or a field as in another file."""
    other = PUBLISHED[case.choice(NATIVE)]
    large = 256 if kept else 1 << 40
    names = [name for name, value in other.items() if name not in kept and not isinstance(value, dict | list)
             and not (isinstance(value, int) and value > large)]  # fmt: skip
    if case.random() < 0.3 and names:
        name = case.choice(names)
        return (name, other[name]), json.dumps({**raw, name: other[name]})
    place, value = case.choice([place for place in places_in(raw) if place[0] not in kept]), case.choice(values)
    return (*place, "removed" if value is REMOVED else value), mutated(json.dumps(raw), place, value)


def names_a_field(problem: str, raw: dict[str, Any], name: str) -> bool:
    """Whether a sentence has the name of a field of the file; all of it may be unreadable, or of another model."""
    fields = [name, *raw, *(raw.get("text_config") or ()), "rope_parameters", "experts", "scale=", "_size"]
    if any(field in problem for field in fields) or "cannot be read as JSON" in problem:
        return True
    return name in ("model_type", "architectures", "text_config") and ("model " in problem or "text_config" in problem)


def theirs(folder: Path, content: dict[str, Any]) -> Any:
    """transformers' configuration of the file's text part; None if it makes none."""
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
    except Exception:
        return None
    for name in PARTS:
        given = {**content, **(content.get("text_config") or {})}
        setattr(config, name, given.get(name, getattr(config, name, None)))
    config.architectures, config.dtype = None, torch.float32
    return config


def test_a_changed_field_is_read_alike_or_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = []
    for case in cases("published configs", 150):
        name = case.choice(ACCEPTED)
        what, text = changed(case, PUBLISHED[name], VALUES)
        (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
        caplog.clear()
        with case.named((name, what)), caplog.at_level(logging.WARNING, "evalengine"), in_time():
            try:
                spec = folder_spec(tmp_path, "here", with_weights=False)
            except EvalEngineError as error:
                problems = error.problems if isinstance(error, ConfigError) else [str(error)]
                assert all(problem.isprintable() and len(problem) < 3000 for problem in problems)
                assert any(names_a_field(problem, PUBLISHED[name], what[0]) for problem in problems), problems
                outcomes.append("refused")
                continue
            instead = [line for line in caplog.messages if "running transformers' own module instead" in line]
            outcomes.append(spec.implementation)
            assert len(instead) == (spec.implementation == "transformers"), caplog.text
            content = json.loads(text)
            if spec.implementation == "native" and (config := theirs(tmp_path, content)) is not None:
                ours, other = spec_from_json(content), from_hf(config)
                assert dataclasses.replace(ours, architecture=other.architecture, dtype=other.dtype) == other
    assert {"refused", "native"} <= {*outcomes}


def test_a_changed_tiny_model_has_transformers_logits(tmp_path: Path) -> None:
    compared = 0
    for case in cases("published tiny models", 12):
        name = case.choice(NATIVE)
        what, text = changed(case, tiny(PUBLISHED[name]), SMALL, SIZES)
        folder = tmp_path / case.name.replace("/", "-")
        folder.mkdir()
        (folder / "config.json").write_text(text)
        with case.named((name, what)), in_time():
            content = json.loads(text)
            try:
                spec_from_json(content)
            except ConfigError:
                continue
            try:
                saved_random(read_by_transformers(content, folder), folder)(torch.tensor([[3, 4, 5]]))
            except Exception:  # transformers cannot run it
                continue
            try:
                ours, other = logprobs_of_both(content, folder)
            except EvalEngineError:  # the tensors do not fit
                continue
            assert float((ours - other).square().mean().sqrt()) < 3e-4 * float(other.std()), "a different model"
            compared += 1
    assert compared
