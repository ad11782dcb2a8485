"""The shapes that `benchmarks matmul` measures and tunes."""

from __future__ import annotations

from benchmarks.matmul_points import shapes


def test_a_rank_has_its_own_rows_of_every_weight() -> None:
    """Two ranks of Qwen3-8B: 16 of 32 query heads and 4 of 8 KV heads of 128, and half of every output."""
    of_rank = {name: (shape.n, shape.k) for shape in shapes(ranks=2) for name in shape.names}
    assert of_rank["Qwen3-8B of 2 ranks qkv_proj"] == ((16 + 2 * 4) * 128, 4096)
    assert of_rank["Qwen3-8B of 2 ranks o_proj"] == (2048, 4096)
    assert of_rank["Qwen3-8B of 2 ranks gate_up_proj"] == (12288, 4096)
    assert of_rank["Qwen3-8B of 2 ranks down_proj"] == (2048, 12288)
    assert of_rank["Qwen3-8B of 2 ranks lm_head"] == (151936 // 2, 4096)


def test_models_whose_heads_ranks_cannot_share_are_left_out() -> None:
    """SmolLM2-135M has nine query heads."""
    assert any("SmolLM2-135M" in name for shape in shapes() for name in shape.names)
    assert not any("SmolLM2-135M" in name for shape in shapes(ranks=2) for name in shape.names)
