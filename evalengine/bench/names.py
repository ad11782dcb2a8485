"""The names that `bench` takes: of its benchmarks, and of the models that they measure."""

from __future__ import annotations

BENCHES = ("matmul", "attention", "rows", "forward", "transformers")
MODELS = ("Qwen3-0.6B", "Qwen3-8B")
THROUGHPUT_MODELS = "shape:qwen3-0.6b,shape:qwen3-8b"  # as --models takes them
