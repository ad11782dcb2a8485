"""`set_batch_invariant_mode` around a model of transformers: a row of a padded batch has the bits that it has alone.

python examples/batch_invariant_transformers.py [FOLDER]
"""

from __future__ import annotations

import sys
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evalengine import set_batch_invariant_mode

PROMPTS = [
    "Question: 2 + 2?\nAnswer:",
    "Question: Arlo collects 45 flowers and gives 12 away. How many has he?\nAnswer:",
]


def last_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """The logits [vocab_size] after the last token of a row; padding lies on the right."""
    length = int(batch["attention_mask"][row].sum())
    logits: torch.Tensor = model(**batch).logits[row, length - 1]
    return logits


def main(folder: str | None = None) -> None:
    """Compares each prompt alone with the same prompt in a batch, in the mode and outside it."""
    path = folder or str(files("evalengine") / "assets" / "tinymath")
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def differing() -> int:
        """How many of the logits differ between a prompt alone and the same prompt in the batch."""
        together = tokenizer(PROMPTS, return_tensors="pt", padding=True)
        found = 0
        for row, prompt in enumerate(PROMPTS):
            alone = last_logits(model, tokenizer([prompt], return_tensors="pt"), 0)
            found += int((alone != last_logits(model, together, row)).sum())
        return found

    with torch.inference_mode():
        print(f"ordinary mode: {differing()} logits differ")
        with set_batch_invariant_mode():
            print(f"batch-invariant mode: {differing()} logits differ")


if __name__ == "__main__":
    main(*sys.argv[1:2])
