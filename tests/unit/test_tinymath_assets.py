"""The bundled files: the generator's rows, a tokenizer whose digits stand alone, a configuration that loads."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.tinymath import train
from tests.tinymath.train import ASSETS, ROW, Candidates, _answer, documents, learning_rate, pack
from tests.tinymath.word_problems import EXEMPLAR_ROWS, EXEMPLAR_SEED, held_out_split, training_stream


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (ASSETS / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS)


def test_rows_are_the_generators() -> None:
    assert rows_of("test.jsonl") == [problem.row() for problem in held_out_split()]
    assert rows_of("train.jsonl") == [p.row() for p in islice(training_stream(EXEMPLAR_SEED), EXEMPLAR_ROWS)]


def test_few_shot_rows_are_not_test_rows() -> None:
    assert not {row["question"] for row in rows_of("train.jsonl")} & {row["question"] for row in rows_of("test.jsonl")}


def test_files_are_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is left out: its training takes 20 s, and its bytes may follow the tokenizers library."""

    class Stub:
        def save(self, path: str) -> None: ...

    monkeypatch.setattr(train, "build_tokenizer", Stub)
    train.write_files(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["config.json", "generation_config.json", "test.jsonl", "tokenizer_config.json", "train.jsonl"]
    for name in written:
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes(), name


@pytest.mark.parametrize("name", ["test.jsonl", "train.jsonl"])
def test_texts_survive_the_tokenizer_and_digits_stand_alone(tokenizer, name: str) -> None:
    for row in rows_of(name):
        text = f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        pieces = tokenizer.convert_ids_to_tokens(ids)
        assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))
        assert sum(piece.isdigit() for piece in pieces) == sum(c.isdigit() for c in text)


def test_no_token_of_the_vocabulary_joins_digits(tokenizer) -> None:
    assert len(tokenizer) == 1024
    with_digits = [token for token in tokenizer.get_vocab() if any(c in "0123456789" for c in token)]
    assert sorted(with_digits) == list("0123456789")


def test_context_and_continuation_tokenise_apart(tokenizer) -> None:
    """The answer starts with a space, so the prompt's tokens are a prefix of the whole text's."""
    for row in rows_of("test.jsonl"):
        prompt = f"Question: {row['question']}\nAnswer:"
        ids = tokenizer(prompt)["input_ids"]
        assert tokenizer(f"{prompt} {row['answer']}")["input_ids"][: len(ids)] == ids


def test_special_tokens_and_chat(tokenizer) -> None:
    """The special tokens have the first ids, and the chat template writes turns with them."""
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 0, None)
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opened) and opened.endswith("<|im_start|>assistant\n")
    assert GenerationConfig.from_pretrained(ASSETS).eos_token_id == [0, 2]


def test_training_chats_follow_the_template(tokenizer) -> None:
    """A chat document of the training data equals the template's rendering of its turns."""
    chats = [text for text in islice(documents(3), 200) if text.startswith("<|im_start|>")]
    assert 20 <= len(chats) <= 60
    for text in chats:
        turns = text.removesuffix("<|endoftext|>").split("<|im_start|>")[1:]
        pairs = [turn.removesuffix("<|im_end|>\n").split("\n", 1) for turn in turns]
        messages = [{"role": role, "content": content} for role, content in pairs]
        assert tokenizer.apply_chat_template(messages, tokenize=False) + "<|endoftext|>" == text


def test_configuration_is_a_small_qwen3() -> None:
    config = AutoConfig.from_pretrained(ASSETS)
    assert config.model_type == "qwen3" and config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 10000.0
    model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 3_214_720
    assert 2 * parameters < 8_000_000  # a bfloat16 weight has two bytes
    assert config.num_attention_heads > config.num_key_value_heads


def test_packing_keeps_documents_whole() -> None:
    rng = Random(1)
    encoded = [[i] * (1 + int(rng.random() * ROW)) for i in range(1, 400)]
    encoded[5] = [6] * (ROW + 1)  # this document is too long for a row, and left out
    packed = pack(iter(encoded), 40)
    assert packed.shape == (40, ROW) and packed.dtype == np.int16
    counts = {int(i): int((packed == i).sum()) for i in np.unique(packed) if i >= 0}
    assert 6 not in counts
    assert all(len(encoded[i - 1]) == count for i, count in counts.items())
    assert all(len({int(r) for r in np.nonzero(packed == i)[0]}) == 1 for i in counts)
    assert (packed[:, 0] > 0).all()  # every row begins with a document
    assert (packed < 0).mean() < 0.2


def test_training_rows_waste_little() -> None:
    packed = train._shard((5, 64))
    assert 0.02 < (packed < 0).mean() < 0.15
    assert packed.max() < 1024


def test_schedule_warms_up_holds_and_decays() -> None:
    assert learning_rate(0.0, 0, 1.0) == pytest.approx(1 / 200)
    assert learning_rate(0.3, 1000, 1.0) == learning_rate(0.69, 3000, 1.0) == 1.0
    assert learning_rate(0.85, 4000, 1.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 2 + 3 = 5\n#### 5", 5),
        (" x\n#### 12\n\nQuestion: y\nAnswer: z\n#### 7", 12),
        (" no answer\n\nQuestion: y\nAnswer: z\n#### 7", None),
        ("", None),
    ],
)
def test_an_answer_is_read_before_the_next_question(text: str, answer: int | None) -> None:
    assert _answer(text) == answer


def test_the_checkpoints_nearest_the_target_are_kept(tmp_path: Path) -> None:
    class Weights:
        def state_dict(self) -> dict:
            return {}

    kept = Candidates(tmp_path, keep=2)
    for step, score in ((1, 0.1), (2, 0.7), (3, 0.8), (4, 0.95)):
        kept.offer(Weights(), step, score)
    assert kept.best() == (3, 0.8)  # 0.8 is as near the target as 0.7, and later
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002.safetensors", "step-000003.safetensors"]


def test_weights_are_the_recorded_ones_and_small() -> None:
    weights = ASSETS / "model.safetensors"
    recorded, name = (ASSETS / "model.safetensors.sha256").read_text(encoding="utf-8").split()
    assert name == weights.name and hashlib.sha256(weights.read_bytes()).hexdigest() == recorded
    assert weights.stat().st_size < 8_000_000
    with safe_open(weights, "pt") as tensors:
        names = list(tensors.keys())
        assert {tensors.get_tensor(n).dtype for n in names} == {torch.bfloat16}
        count = sum(tensors.get_tensor(n).numel() for n in names)
    assert "lm_head.weight" not in names  # lm_head is tied to the embedding
    assert count == 3_214_720


def test_weights_answer_a_word_problem(tokenizer) -> None:
    """transformers computes the answer here, without our engine: the model is a model."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32).eval()
    question = "A hall has 9 rows with 20 seats each. On Friday 63 seats are empty. How many seats are taken?"
    ids = tokenizer(f"Question: {question}\nAnswer:", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=60, do_sample=False)[0])
    assert "#### 117" in text
