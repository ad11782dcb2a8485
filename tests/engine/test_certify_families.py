"""`verify engine --quick` on models beside Llama: every axis is identical, and the control differs."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from evalengine.__main__ import main
from evalengine.certify.axes import AXES
from tests.engine.certify_double import CPU
from tests.parity.families import CAPS, configuration

OF_THE_GPU = {"graphs", "cascade", "busy"}
# Six layers, of which five see 33 keys; and two whose scores and logits are capped, with a window that nothing reaches.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windowed": ("gemma3_text", {"sliding_window": 33, "query_pre_attn_scalar": 24, "num_hidden_layers": 6}),
    "capped": ("gemma2", {**CAPS, "sliding_window": 512, "num_hidden_layers": 2}),
}


@pytest.mark.slow  # half a minute of one core each
@pytest.mark.parametrize("name", MODELS)
def test_every_axis_is_identical_and_the_control_differs(name: str, tmp_path: Path) -> None:
    asset = Path(str(files("evalengine.assets") / "tinymath"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(asset / file, tmp_path)
    model_type, more = MODELS[name]
    vocabulary = json.loads((asset / "config.json").read_text())["vocab_size"]
    config = configuration(model_type, {**more, "vocab_size": vocabulary})
    config.save_pretrained(tmp_path)
    out = tmp_path / "certificate.json"
    words = (*CPU, f"model.path={tmp_path}", f"model.name={name}", "model.load_format=dummy")
    assert main(["verify", "engine", *words, "--quick", "--out", str(out)]) == 0
    certificate = json.loads(out.read_text())
    assert certificate["verdict"] == "IDENTICAL" and certificate["total"]["differing_bytes"] == 0
    assert set(certificate["axes"]) == set(AXES)
    idle = {axis for axis, result in certificate["axes"].items() if not result["logprobs"]}
    assert idle == OF_THE_GPU
    assert certificate["negative_control"]["differing_logprobs"] > 0
