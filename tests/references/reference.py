"""A plain float64 reference for each op. Kernels are tested and benchmarked against it.

    T tokens, K input features, N output features, I intermediate size, Hq/Hkv heads, D head_dim, n rows, V vocabulary.

Inputs have any float dtype; outputs are float64, but for a KV write (pools of their own dtype) and sampling (ids).
"""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.kernels.attention_variant import AttentionVariant
from evalengine.kernels.mixture_variant import Router

_MASK32 = 0xFFFFFFFF


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K], [N, K], [N] -> [..., N]."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def of_small_float(codes: Tensor, exponent_bits: int, mantissa_bits: int) -> Tensor:
    """Integers whose lowest bits are sign, exponent and mantissa -> float64: e2m1 (2, 1) and e4m3fn (4, 3), whose
    largest codes are NaN (OCP Microscaling Formats v1.0, section 5.3)."""
    mantissa = (codes & ((1 << mantissa_bits) - 1)).double() / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    size = (
        torch.where(exponent == 0, mantissa * 2, 1 + mantissa)
        * 2.0 ** (exponent - (1 << (exponent_bits - 1)) + 1).double()
    )
    size[(codes & 0x7F) == 0x7F] = torch.nan
    return torch.where((codes >> (exponent_bits + mantissa_bits)) & 1 == 1, -size, size)


def dequantized(numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """float64 of one shape -> the float32 numbers that packed weights stand for: (number - zero) * scale, rounded once.
    float64 holds the product of two numbers of at most 24 bits exactly."""
    return ((numbers if zeros is None else numbers - zeros) * scales).float()


def fp8_rows(x: Tensor, group: int, scale: float | None = None, power: bool = False) -> Tensor:
    """[T, K], `group` dividing K -> float64: each number as the nearest e4m3 number, equals to the even one, times the
    scale: a 448th of the group's largest magnitude, up to a power of two if `power`, or `scale`. Scale and quotient are
    rounded to float32."""
    wide = x.double().unflatten(-1, (-1, group))
    s = (wide.abs().amax(-1, keepdim=True) / 448).float().double().clamp(min=2.0**-126)
    s = torch.exp2(s.log2().ceil()) if power else s
    s = s if scale is None else torch.full_like(s, scale)
    codes = torch.arange(127)
    numbers = of_small_float(codes, 4, 3)
    distance = ((wide / s).float().double().abs().clamp(max=448).unsqueeze(-1) - numbers).abs()
    nearest = torch.where(distance == distance.amin(-1, keepdim=True), codes % 2, 2).argmin(-1)
    return (numbers[nearest] * wide.sign() * s + 0.0).flatten(-2)  # -0 + 0 is +0


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K], [B, K, N] -> [B, M, N]."""
    return torch.bmm(a.double(), b.double())


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """[..., H], [H] -> [..., H]; the weight counts with the offset added to it."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[..., H], [H], [H] -> [..., H]."""
    bias = None if bias is None else bias.double()
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias, eps)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Any shape."""
    return (logits.double() / cap).tanh() * cap


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Any shape, along `dim`."""
    return x.double().log_softmax(dim)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Any shape, along `dim`."""
    return x.double().softmax(dim)


def mean(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Any shape, over `dim`."""
    return x.double().mean(dim, keepdim)


def activation(x: Tensor, act: str) -> Tensor:
    """Any shape; "silu", "gelu" (x Phi(x)), "gelu_tanh" (x sigmoid(2 u), equal to x (1 + tanh u) / 2) or "relu2"."""
    wide = x.double()
    if act == "relu2":
        return wide.relu().square()
    if act == "gelu":
        return wide * torch.special.erfc(-wide * 0.5**0.5) / 2
    u = (wide + 0.044715 * wide**3) * (2 / torch.pi) ** 0.5
    return wide * {"silu": wide, "gelu_tanh": 2 * u}[act].sigmoid()


def xielu(x: Tensor, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
    """Any shape: alpha_p x^2 + beta x for x > 0, else alpha_n (e^min(x, eps) - 1 - x) + beta x."""
    wide = x.double()
    curve = torch.where(wide > 0, alpha_p * wide * wide, alpha_n * (wide.clamp(max=eps).expm1() - wide))
    return curve + beta * wide


def gated(gate_up: Tensor, act: str) -> Tensor:
    """[T, 2 I] -> [T, I]: act(first half) * second half."""
    gate, up = gate_up.double().chunk(2, -1)
    return activation(gate, act) * up


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]."""
    return gated(gate_up, "silu")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, D] and [T, D/2] -> [T, heads, D], half-split pairs."""
    x1, x2 = x.double().chunk(2, -1)
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """[T, Hkv, D] twice, [B, block, Hkv, D] pools, int64 [T] -> copies of the pools after the write, token by token.

    Each number is rounded once, to the pools' dtype. Slot -1 is skipped; of equal slots the last token's stays.
    """
    pools = k_cache.clone(), v_cache.clone()
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for new, pool in zip((k, v), pools, strict=True):
                pool[slot // pool.shape[1], slot % pool.shape[1]] = new[token].to(pool.dtype)
    return pools


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_lens: list[int], kv_lens: list[int],
    variant: AttentionVariant, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T, Hq, D] against [B, block, Hkv, D] pools, sinks [Hq] -> [T, Hq, D], causal, one sequence after another."""
    group = q.shape[1] // k_cache.shape[2]
    outputs = [torch.empty(0, *q.shape[1:], dtype=torch.float64, device=q.device)]
    start = 0
    for pages, queries, length in zip(block_table.long(), query_lens, kv_lens, strict=True):
        k, v = (
            cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start : start + queries].double(), k) * variant.scale
        if variant.softcap is not None:
            scores = variant.softcap * (scores / variant.softcap).tanh()
        keys = torch.arange(length, device=q.device)
        rows = keys[length - queries :, None]
        hidden = keys > rows
        if variant.window is not None:
            hidden |= keys <= rows - variant.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += queries
    return torch.cat(outputs)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """[B, Hq, L, D] against [B, Hkv, S, D] -> [B, Hq, L, D]; a row that sees no key gives 0."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0) @ v


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of 32-bit words, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def gumbel_noise(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """int64 [n] (64 bits), int64 [n] below 2^32 -> [n, V]: -log(-log u), u = (Philox's first word + 1/2) 2^-32.

    The counter is (token id, position, 0, 0), the key its low word and its high word. About 10 us a number.
    """
    words = [
        philox((token, position, 0, 0), (key & _MASK32, (key >> 32) & _MASK32))[0]
        for key, position in zip(keys.tolist(), positions.tolist(), strict=True)
        for token in range(vocab_size)
    ]
    uniform = (torch.tensor(words, dtype=torch.float64, device=keys.device) + 0.5) * 2.0**-32
    return -(-uniform.log()).log().view(len(keys), vocab_size)


def kept_tokens(logprobs: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """[V] -> int64 ids of the tokens that may be drawn, by (probability descending, id ascending).

    They are the fewest of the top_k most probable tokens (0: of all) whose mass reaches top_p of those tokens' mass.
    """
    ids = logprobs.argsort(descending=True, stable=True)[: top_k or None]
    if top_p >= 1:
        return ids
    mass = (logprobs[ids].double() / temperature).softmax(0).cumsum(0)
    return ids[: int((mass < top_p * mass[-1]).sum()) + 1]


def sample(logprobs: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """[n, V], [n] > 0, int64 [n] (0: off), [n], `gumbel_noise` [n, V] -> int64 [n], row by row.

    The kept token with the largest logprob / temperature + noise is drawn; of equals the lowest id. Inputs hold no NaN.
    """
    drawn = []
    settings = zip(temperatures.tolist(), top_k.tolist(), top_p.tolist(), strict=True)
    for row, (temperature, k, p) in enumerate(settings):
        ids = kept_tokens(logprobs[row], temperature, k, p)
        noisy = logprobs[row, ids].double() / temperature + noise[row, ids]
        drawn.append(int(ids[noisy == noisy.max()].min()))
    return torch.tensor(drawn, dtype=torch.int64, device=logprobs.device)


def route(logits: Tensor, choice_bias: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """[T, E], [E] -> experts int64 [T, k] by rank, weights [T, k], token by token. What is compared (scores, with the
    bias, and sums of two) is rounded to float32 first, so that ties are those of the levels."""
    chosen, weights = [], []
    for row in logits.double():
        scores = {"softmax": row.softmax(0), "sigmoid": row.sigmoid(), "logit": row}[router.scores].float().double()
        choice = (scores if choice_bias is None else scores + choice_bias.double()).float().tolist()
        size = router.experts // router.groups
        by_group = [
            sorted(choice[g * size : (g + 1) * size], reverse=True)[: router.group_best] for g in range(router.groups)
        ]
        sums = torch.tensor(by_group).float().sum(-1).tolist()
        kept = sorted(range(router.groups), key=lambda g: (-sums[g], g))[: router.kept_groups]
        open_ids = [e for e in range(router.experts) if e // size in kept]
        ids = sorted(open_ids, key=lambda e: (-choice[e], e))[: router.chosen]
        own = scores[ids]
        if router.scores == "logit":
            own = own.softmax(0)
        elif router.normed:
            own = own / max(float(own.sum()) + router.sum_offset, router.least_sum)
        chosen.append(ids)
        weights.append(own * router.scaling)
    return torch.tensor(chosen), torch.stack(weights)


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """[T, K] or [T, k, K], [E, N, K], [E, N], int [T, k] -> [T, k, N], a row after another."""
    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1) if x.ndim == 2 else x
    y = [
        linear(rows[t, r], weight[e], None if bias is None else bias[e])
        for t, experts in enumerate(ids.tolist())
        for r, e in enumerate(experts)
    ]
    return torch.stack(y).view(*ids.shape, -1)


def combine(x: Tensor, weights: Tensor) -> Tensor:
    """[T, k, H], [T, k] -> [T, H]."""
    return (x.double() * weights.double().unsqueeze(-1)).sum(1)


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """[T, H], [T, 1] -> [T, H]."""
    return x.double() * logits.double().sigmoid()


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]."""
    gate, up = gate_up.double().chunk(2, -1)
    gate = gate.clamp(max=7)
    return (up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, *, silu: bool) -> Tensor:
    """One sequence's [n, C], weights [C, K] and the K - 1 inputs [K - 1, C] before it -> [n, C].

    out[t] = bias + sum_j weight[:, j] x[t - K + 1 + j], then its silu if asked for.
    """
    whole, taps = torch.cat([before.double(), x.double()]), weight.shape[1]
    out = torch.stack([weight[:, j].double() * whole[j : j + len(x)] for j in range(taps)]).sum(0)
    out = out if bias is None else out + bias.double()
    return activation(out, "silu") if silu else out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence's q, k [n, Hk, K], v [n, Hv, V], a, b [n, Hv] and state [Hv, V, K] -> ([n, Hv, V], the new state).

    The recurrence of transformers' `torch_recurrent_gated_delta_rule` with normed q and k (modeling_qwen3_5.py):
    S = exp(g) S; S = S + beta (v - S k) k^T; o = S q K^-0.5, g = -exp(a_log) softplus(a + dt_bias), beta = beta_scale
    sigmoid(b).
    """
    q, k, v, a, b, state = (x.double() for x in (q, k, v, a, b, state))
    group = v.shape[1] // q.shape[1]
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(group, 1) for x in (q, k))
    g = -a_log.double().exp() * torch.nn.functional.softplus(a + dt_bias.double())
    beta, out = beta_scale * b.sigmoid(), torch.empty_like(v)
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        delta = (v[t] - (state * k[t][:, None]).sum(-1)) * beta[t][:, None]
        state = state + delta[..., None] * k[t][:, None]
        out[t] = (state * q[t][:, None]).sum(-1) * k.shape[-1] ** -0.5
    return out, state


def mamba2(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, state: Tensor,
    dt_limits: tuple[float, float | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence's x [n, H, P], b, c [n, G, N], dt [n, H] and state [H, P, N] -> ([n, H, P], the new state).

    The recurrence of transformers' `mamba2_selective_state_update` (modeling_granitemoehybrid.py), with one rule for
    the time step everywhere: dt = clamp(softplus(dt + dt_bias)); S = exp(-dt exp(a_log)) S + dt x b^T; y = S c + d x.
    """
    x, b, c, state = x.double(), b.double(), c.double(), state.double()
    group = x.shape[1] // b.shape[1]
    b, c = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
    dt = torch.nn.functional.softplus(dt.double() + dt_bias.double()).clamp(*dt_limits)
    decay, out = (-dt * a_log.double().exp()).exp(), torch.empty_like(x)
    for t in range(len(x)):
        state = state * decay[t][:, None, None] + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
        out[t] = (state * c[t][:, None]).sum(-1) + d.double()[:, None] * x[t]
    return out, state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, *, gate_first: bool) -> Tensor:
    """[..., W] twice, weight [W] or [group] -> [..., W]: the RMS norm of each `group` of numbers times silu(gate), or
    of x * silu(gate)."""
    x, factor = x.double(), activation(gate.double(), "silu")
    x = x * factor if gate_first else x
    groups = x.unflatten(-1, (-1, group))
    normed = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    normed = normed * weight.double().repeat(x.shape[-1] // len(weight))
    return normed if gate_first else normed * factor
