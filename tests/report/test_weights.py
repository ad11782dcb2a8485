"""Which tensors of two checkpoints differ, and whether a run's weights are still the files that it ran with."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from evalengine.records.manifest_data import Manifest
from evalengine.report.compare import weight_tensors
from evalengine.report.compare.as_json import comparison_json
from evalengine.report.compare.comparability import incomparable
from evalengine.report.compare.compare import compared
from evalengine.report.compare.report import report
from evalengine.report.compare.weight_tensors import differing_tensors, differing_weights
from evalengine.report.html.comparison_page import comparison_page
from evalengine.report.read.run import Run
from evalengine.util.plain_files import fingerprint
from tests.parity.gguf_files import write_file
from tests.report.compared_runs import BASE, TOKEN, run


def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 5), "b.weight": (4,), "c.weight": (2, 2)}
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def saved(folder: Path, changed: Mapping[str, torch.Tensor | None], name: str = "model.safetensors") -> Path:
    """The file of a checkpoint with these tensors changed, or left out where they are None."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**tensors(), **changed}
    save_file({key: value for key, value in merged.items() if value is not None}, folder / name)
    return folder / name


def one_bit() -> torch.Tensor:
    """The tensor b.weight with one bit of one element changed."""
    value = tensors()["b.weight"].clone()
    value.view(torch.int16)[2] ^= 1
    return value


def described(tmp_path: Path, changed: Mapping[str, torch.Tensor | None]) -> list[str]:
    """What differs between a checkpoint and its copy with `changed`, in words."""
    return differing_tensors([saved(tmp_path / "a", {})], [saved(tmp_path / "b", changed)])


def test_one_bit_of_one_tensor_is_named(tmp_path: Path) -> None:
    delta = float((one_bit().double() - tensors()["b.weight"].double()).abs().max())
    assert described(tmp_path, {"b.weight": one_bit()}) == [
        "1 of 3 tensors differs",
        f"b.weight: 1 of 4 elements, by at most {delta:.3g}",
    ]
    assert described(tmp_path, {}) == ["0 of 3 tensors differ"]


def test_the_largest_change_comes_first_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {f"t{i}": torch.full((2,), float(i)) for i in range(7)}
    a, b = saved(tmp_path / "a", more), saved(tmp_path / "b", {name: 2 * value for name, value in more.items()})
    monkeypatch.setattr(weight_tensors, "AT_ONCE", 3)  # tensors are then read in several parts
    lines = differing_tensors([a], [b])
    assert lines[:2] == ["6 of 10 tensors differ, the largest change first", "t6: 2 of 2 elements, by at most 6"]
    assert lines[-1] == "... and 1 more" and len(lines) == 7


def test_other_shapes_dtypes_and_names_are_told_apart(tmp_path: Path) -> None:
    whole = tensors()
    b = saved(
        tmp_path / "b",
        {"a.weight": whole["a.weight"][:2], "b.weight": whole["b.weight"].float(), "c.weight": None, "d": one_bit()},
    )
    assert differing_tensors([saved(tmp_path / "a", {})], [b]) == [
        "1 tensor only in A: c.weight",
        "1 tensor only in B: d",
        "2 of 2 tensors differ, the largest change first",
        "a.weight: BF16 [3, 5] in A and BF16 [2, 5] in B",
        "b.weight: the same values, stored otherwise (BF16 [4] in A, F32 [4] in B)",
    ]


def test_not_a_number_and_integers_are_compared(tmp_path: Path) -> None:
    nan, steps = torch.tensor([float("nan"), 1.0, 2.0, 3.0]), torch.arange(4)
    a = saved(tmp_path / "a", {"n": nan, "i": steps})
    changed = torch.tensor([float("nan"), float("nan"), 2.0, 3.5])
    lines = differing_tensors([a], [saved(tmp_path / "b", {"n": changed, "i": steps + 1})])
    assert lines[1:] == ["i: I64 [4] in A and I64 [4] in B", "n: 2 of 4 elements, by at most 0.5"]


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    whole = tensors()
    folder = tmp_path / "b"
    folder.mkdir()
    save_file({"a.weight": whole["a.weight"]}, folder / "one.safetensors")
    save_file({"b.weight": one_bit(), "c.weight": whole["c.weight"]}, folder / "two.safetensors")
    first, second = differing_tensors([saved(tmp_path / "a", {})], sorted(folder.iterdir()))
    assert first == "1 of 3 tensors differs" and second.startswith("b.weight: 1 of 4 elements, by ")


def written_gguf(file: Path, shift: float) -> Path:
    """A GGUF file of a float32 and a Q8_0 tensor; `shift` is added to the values of the second."""
    writer = gguf.GGUFWriter(str(file), "llama")
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("plain", values)
    quantised = gguf.quants.quantize(values + shift, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.ffn_down.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    write_file(writer)
    return file


def test_quantised_tensors_are_compared_by_what_they_stand_for(tmp_path: Path) -> None:
    a, b = written_gguf(tmp_path / "a.gguf", 0.0), written_gguf(tmp_path / "b.gguf", 0.5)
    _, line = differing_tensors([a], [b])
    said, largest = line.rsplit(" ", 1)
    assert said == "blk.0.ffn_down.weight: 64 of 64 elements, by at most"
    assert float(largest) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": {}}']
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=r"safetensors|empty"):
        differing_tensors([bad], [bad])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"GGUF", "needs 4 bytes more"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "claims 1099511627776 tensors"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**40),
            "claims 1099511627776 items",
        ),
    ],
)
def test_a_damaged_gguf_file_is_a_sentence(tmp_path: Path, content: bytes, problem: str) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.gguf: .*{problem}"):
        differing_tensors([bad], [bad])


def run_of(file: Path, outputs: Any = BASE, **model: Any) -> Run:
    """A run that recorded this file's weights, and where the file lay."""
    base = run(outputs, weights=fingerprint([file]))
    about = {"source": str(file.parent), "format": "safetensors", **model}
    return replace(base, manifest=Manifest({**base.manifest.content, "model": about}))


def test_a_comparison_names_the_tensors(tmp_path: Path) -> None:
    a, b = run_of(saved(tmp_path / "a", {})), run_of(saved(tmp_path / "b", {"b.weight": one_bit()}), TOKEN)
    c = compared(a, b, allow=True)
    assert c.tensors[0] == "1 of 3 tensors differs" and c.tensors[1].startswith("b.weight: 1 of 4 elements")
    lines = [line for line in report(c) if isinstance(line, str)]
    assert lines[lines.index("Weights that differ:") + 1] == "  - 1 of 3 tensors differs"
    assert comparison_json(c)["tensors"] == c.tensors and c.tensors[1] in comparison_page(c).render()
    assert compared(a, a, allow=True).tensors == []
    merged = replace(b, manifest=Manifest({"model": {**b.manifest.content["model"], "adapter": {"source": "lora"}}}))
    assert any('adapter is none in A and "lora" in B' in text for text in incomparable(a, merged))


def test_weights_that_changed_since_their_run_are_not_compared(tmp_path: Path) -> None:
    """The files that the manifests name must be those that ran: their hash tells."""
    a, b = run_of(saved(tmp_path / "a", {})), run_of(saved(tmp_path / "b", {"b.weight": one_bit()}))
    saved(tmp_path / "b", {"a.weight": tensors()["a.weight"] + 1})
    (line,) = differing_weights(a, b)
    assert line.startswith("which tensors differ is not known: B's weights at ") and "are others now" in line


def test_why_weights_cannot_be_read_is_said(tmp_path: Path) -> None:
    a = run_of(saved(tmp_path / "a", {}))
    b = run_of(saved(tmp_path / "b", {"b.weight": one_bit()}))

    def why(**model: Any) -> str:
        changed = Manifest({"model": {**b.manifest.content["model"], **model}})
        return " ".join(differing_weights(a, replace(b, manifest=changed)))

    assert why(source="some/hub-id").endswith("B's weights are not at some/hub-id on this machine")
    assert why(source=None).endswith("B's weights are not named in its manifest")
    assert why(adapter={"source": "lora"}).endswith(
        "B's weights are merged with an adapter in memory, so no file has them"
    )
    assert "B's weights are in PyTorch files, which are not compared by tensor" in why(format="pytorch")
    assert why(format="dummy").endswith("B's weights are dummies, and in no file")
    assert "GB, which `explain` reads" in " ".join(differing_weights(a, b, at_most=10))
    assert differing_weights(a, replace(b, identity={})) == [] == differing_weights(a, a)


def test_an_index_names_the_files_that_count(tmp_path: Path) -> None:
    a = run_of(saved(tmp_path / "a", {}))
    folder = tmp_path / "b"
    shard = saved(folder, {"b.weight": one_bit()}, "part.safetensors")
    saved(folder, {}, "unused.safetensors")
    index = {"weight_map": dict.fromkeys(tensors(), "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert differing_weights(a, run_of(shard))[1].startswith("b.weight: 1 of 4 elements")


def test_bundled_weights_are_found(tmp_path: Path) -> None:
    import evalengine

    file = Path(evalengine.__file__).parent / "assets" / "tinymath" / "model.safetensors"
    a = run_of(file, source="asset:tinymath")
    assert "3 tensors only in B: a.weight, b.weight, c.weight" in differing_weights(
        a, run_of(saved(tmp_path / "b", {}))
    )
