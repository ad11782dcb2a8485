"""Small models of transformers, around which `set_batch_invariant_mode` is tested."""

from __future__ import annotations

import torch


def small_model(architecture: str, attention: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of two layers with random weights, of sizes that are no powers of two."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(
        hidden_size=60, intermediate_size=116, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=20, vocab_size=211, max_position_embeddings=128, attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(dtype).eval()
