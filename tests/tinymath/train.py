"""Builds the bundled model `tinymath` from nothing: its tokenizer, its data files and its weights.

    python -m tests.tinymath.train files            # config, tokenizer, test.jsonl, train.jsonl
    python -m tests.tinymath.train train --out DIR  # DIR/model.safetensors is the one to bundle

Training follows a warm-up / stable / decay schedule on one GPU. Every `--eval-every` steps the weights, rounded to
bfloat16, answer the 200 test rows greedily; the checkpoints nearest `TARGET` exact match are kept in DIR/checkpoints
and the nearest one is written as DIR/model.safetensors with its SHA-256. DIR/train_log.jsonl has a line for each
evaluation. One wrong answer in four is on purpose: a model that is always right cannot show an answer that flips. A
repeated run need not give the same weights (GPU reductions, wall-clock schedule).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, TextIO

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tinymath.word_problems import EXEMPLAR_ROWS, EXEMPLAR_SEED, Problem, held_out_split, training_stream

ASSETS = Path(str(files("evalengine.assets") / "tinymath"))
END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB = 1024
ROW = 512  # tokens in a training row
MAX_PAIRS, CHAT_SHARE = 4, 0.2
OPEN_ROWS = 32  # rows that packing fills at the same time
TARGET = 0.75
ANSWER_TOKENS = 112  # the longest of 20,000 rationales has 81 tokens
SEED = 20_260
Model = Any  # a Qwen3ForCausalLM; transformers' own annotations do not type-check

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 1024, "sliding_window": None,
    "use_sliding_window": False, "max_window_layers": 5, "initializer_range": 0.02, "tie_word_embeddings": True,
    "use_cache": True, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


# --- files: everything in assets/tinymath but the weights and the card ---


def write_files(folder: Path) -> None:
    """Writes the configuration, the tokenizer, the test split and the exemplars; the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [0, 2], "pad_token_id": 0})
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END, "pad_token": END,
        "additional_special_tokens": [TURN, TURN_END], "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    exemplars = islice(training_stream(EXEMPLAR_SEED), EXEMPLAR_ROWS)
    for name, problems in (("test", held_out_split()), ("train", list(exemplars))):
        lines = [json.dumps(problem.row()) + "\n" for problem in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE over the generator's own texts. Every digit is a token: numbers are split before the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(documents(SEED), 20_000), trainer)
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- data: endless problems, written as documents, packed into rows ---


def documents(seed: int) -> Iterator[str]:
    """Endless training documents of one to MAX_PAIRS problems; CHAT_SHARE of them in the chat format."""
    rng, problems = Random(seed), training_stream(seed + 1)
    while True:
        pairs = list(islice(problems, 1 + int(rng.random() * MAX_PAIRS)))
        if rng.random() < CHAT_SHARE:
            bare = rng.random() < 0.5  # the user's turn is the bare question, or the plain format's prompt
            yield "".join(_turns(pair, bare) for pair in pairs) + END
        else:
            yield "\n\n".join(prompt(pair) + " " + pair.row()["answer"] for pair in pairs) + END


def prompt(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer:"


def _turns(problem: Problem, bare: bool) -> str:
    user = problem.question if bare else prompt(problem)
    return f"{TURN}user\n{user}{TURN_END}\n{TURN}assistant\n{problem.row()['answer']}{TURN_END}\n"


def pack(encoded: Iterator[list[int]], rows: int) -> np.ndarray:
    """Fills int16 `[rows, ROW]` with whole documents, first fit; -1 where a row ends early (7 % of all, no loss there).

    A row begins with a document, so position 0 is the start of a prompt in training as it is in use.
    """
    packed = np.full((rows, ROW), -1, dtype=np.int16)
    done, used = 0, [0] * min(OPEN_ROWS, rows)  # used: tokens in the rows done .. done + len(used) - 1
    for ids in encoded:
        if len(ids) > ROW:
            continue
        slot = next((i for i, count in enumerate(used) if count + len(ids) <= ROW), None)
        if slot is None:
            done, slot = done + 1, len(used) - 1
            used = [*used[1:], 0]
            if done + len(used) > rows:
                break
        packed[done + slot, used[slot] : used[slot] + len(ids)] = ids
        used[slot] += len(ids)
    return packed


def _shard(task: tuple[int, int]) -> np.ndarray:
    seed, rows = task
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    stream = documents(seed)

    def encoded() -> Iterator[list[int]]:
        while True:
            yield from (e.ids for e in tokenizer.encode_batch(list(islice(stream, 1000)), add_special_tokens=False))

    return pack(encoded(), rows)


def training_rows(rows: int, workers: int, seed: int) -> torch.Tensor:
    """int16 `[rows, ROW]`, rows rounded up to whole shards; the same for any number of processes."""
    size = min(rows, 4096)
    tasks = [(seed + 1000 * (i + 1), size) for i in range(math.ceil(rows / size))]
    with get_context("spawn").Pool(workers) as pool:
        return torch.from_numpy(np.concatenate(pool.map(_shard, tasks, chunksize=1)))


# --- evaluation and checkpoints ---


class Evaluator:
    """Greedy exact match over prompts, by the weights as they would be bundled (bfloat16)."""

    def __init__(self, problems: list[Problem], device: str) -> None:
        self.problems = problems
        self.device = device
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(ASSETS / "tokenizer.json"), eos_token=END, pad_token=END, padding_side="left"
        )

    @torch.inference_mode()
    def exact_match(self, model: Model, prompts: list[str]) -> float:
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        output = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False,
            max_new_tokens=ANSWER_TOKENS, eos_token_id=[0, 2], pad_token_id=0,
        )  # fmt: skip
        texts = self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(_answer(text) == p.answer for text, p in zip(texts, self.problems, strict=True)) / len(texts)

    def zero_shot(self, model: Model) -> float:
        return self.exact_match(model, [prompt(p) for p in self.problems])

    def three_shot(self, model: Model) -> float:
        shots = [f"{prompt(p)} {p.row()['answer']}\n\n" for p in islice(training_stream(EXEMPLAR_SEED), 3)]
        return self.exact_match(model, ["".join(shots) + prompt(p) for p in self.problems])

    def chat(self, model: Model) -> float:
        turn = f"{TURN}user\n{{}}{TURN_END}\n{TURN}assistant\n"
        return self.exact_match(model, [turn.format(prompt(p)) for p in self.problems])


def _answer(text: str) -> int | None:
    match = re.search(r"#### (\d+)", text.split("Question:")[0])
    return int(match[1]) if match else None


class Candidates:
    """Keeps the `keep` checkpoints nearest TARGET on disk; of two equally near ones the later is nearer."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.kept: list[tuple[float, int, float]] = []  # (distance from TARGET, -step, exact match)
        folder.mkdir(parents=True, exist_ok=True)

    def offer(self, model: Model, step: int, score: float) -> None:
        self.kept = sorted([*self.kept, (abs(score - TARGET), -step, score)])
        dropped = self.kept[self.keep :]
        del self.kept[self.keep :]
        for _, negative, _ in dropped:
            self.path(-negative).unlink(missing_ok=True)
        if any(-negative == step for _, negative, _ in self.kept):
            state = {k: v.contiguous().cpu() for k, v in model.state_dict().items() if k != "lm_head.weight"}
            save_file(state, self.path(step), metadata={"format": "pt"})

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.safetensors"

    def best(self) -> tuple[int, float]:
        return -self.kept[0][1], self.kept[0][2]


# --- training ---


def learning_rate(progress: float, step: int, peak: float) -> float:
    """Warm-up over 200 steps, stable, then linear to zero over the last 30 % of the run."""
    return peak * min(1.0, (step + 1) / 200, (1.0 - progress) / 0.3)


def optimizer_for(model: Model, peak: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=torch.cuda.is_available())


def loss_of(model: Model, rows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of int16 rows `[batch, ROW]`, in nats."""
    ids = rows.long()
    with torch.autocast(rows.device.type, dtype=torch.bfloat16, enabled=rows.is_cuda):  # slower than float32 on a CPU
        logits = model(input_ids=ids.clamp(min=0), use_cache=False).logits
    labels = ids[:, 1:].masked_fill(ids[:, 1:] < 0, -100)
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten())


def new_model(device: Any, dtype: torch.dtype) -> Model:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=dtype).to(device)


def bfloat16_copy(model: Model) -> Model:
    copy = new_model(model.device, torch.bfloat16).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def train(args: argparse.Namespace) -> None:
    started, device, out = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu", Path(args.out)
    torch.manual_seed(SEED)
    candidates = Candidates(out / "checkpoints", args.keep)
    data = training_rows(args.rows, args.workers, SEED).to(device)
    evaluator = Evaluator(held_out_split()[: args.eval_rows], device)
    model = new_model(device, torch.float32)
    optimizer = optimizer_for(model, args.lr)
    forward = torch.compile(model) if args.compile else model
    with (out / "train_log.jsonl").open("w", encoding="utf-8") as log:
        parameters = sum(p.numel() for p in model.parameters())
        note(log, rows=len(data), parameters=parameters, seconds=time.monotonic() - started)
        order, step, progress = torch.empty(0, dtype=torch.long), 0, 0.0
        while progress < 1.0:
            if len(order) < args.batch:
                order = torch.cat([order, torch.randperm(len(data))])
            rows, order = data[order[: args.batch].to(device)], order[args.batch :]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, step, args.lr)
            loss = loss_of(forward, rows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            progress = max(step / args.steps, (time.monotonic() - started) / (60 * args.max_minutes))
            if step % args.eval_every == 0 or progress >= 1.0:
                copy = bfloat16_copy(model)
                score = evaluator.zero_shot(copy)
                candidates.offer(copy, step, score)
                note(log, step=step, tokens=step * args.batch * ROW, loss=loss.item(), exact_match=score,
                     lr=optimizer.param_groups[0]["lr"], seconds=time.monotonic() - started)  # fmt: skip
        bundle(out, candidates, evaluator, model, log)


def bundle(out: Path, candidates: Candidates, evaluator: Evaluator, model: Model, log: TextIO) -> None:
    """Writes the chosen checkpoint as model.safetensors with its SHA-256; scores it with exemplars and as a chat."""
    step, score = candidates.best()
    weights = candidates.path(step).read_bytes()
    (out / "model.safetensors").write_bytes(weights)
    digest = hashlib.sha256(weights).hexdigest()
    (out / "model.safetensors.sha256").write_text(f"{digest}  model.safetensors\n", encoding="utf-8")
    chosen = bfloat16_copy(model)
    chosen.load_state_dict(load_file(candidates.path(step)), strict=False)  # strict: lm_head is the tied embedding
    note(log, chosen_step=step, exact_match=score, three_shot=evaluator.three_shot(chosen), chat=evaluator.chat(chosen),
         sha256=digest, bytes=len(weights))  # fmt: skip


def note(log: TextIO, **values: Any) -> None:
    line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()})
    log.write(line + "\n")
    log.flush()
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    files = commands.add_parser("files", help="write configuration, tokenizer and data files")
    files.add_argument("--folder", type=Path, default=ASSETS)
    run = commands.add_parser("train", help="train and choose a checkpoint")
    run.add_argument("--out", required=True)
    run.add_argument("--max-minutes", type=float, default=6.0, help="from the start of the program, data included")
    run.add_argument("--steps", type=int, default=1_000_000, help="at most")
    run.add_argument("--rows", type=int, default=262_144, help=f"training rows of {ROW} tokens, repeated as needed")
    run.add_argument("--batch", type=int, default=256, help="rows in a step")
    run.add_argument("--lr", type=float, default=2e-3)
    run.add_argument("--eval-every", type=int, default=150, help="steps between evaluations")
    run.add_argument("--eval-rows", type=int, default=200, help="test rows to answer; fewer for a trial on a CPU")
    run.add_argument("--keep", type=int, default=6, help="checkpoints to keep, 6.4 MB each")
    run.add_argument("--workers", type=int, default=16)
    run.add_argument("--compile", action="store_true", help="torch.compile the training step")
    args = parser.parse_args()
    if args.command == "files":
        write_files(args.folder)
    else:
        train(args)


if __name__ == "__main__":
    main()
