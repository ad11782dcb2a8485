"""Chooses the next tokens that are not simply the most probable: sampled ones, and those behind logits processors.

n rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from evalengine.engine.execute.batch import SequenceShare
from evalengine.engine.execute.processing import NOTHING_LEFT, forbid, penalise
from evalengine.engine.schedule.sequence import Generating
from evalengine.kernels import sampling
from evalengine.layers.metadata import upload
from evalengine.layers.ops import Ops


def choose(ops: Ops, choosing: list[tuple[SequenceShare, Generating]], scores: Tensor) -> Tensor:
    """The next tokens, int64 [n], of rows whose temperature is positive or where processors come before the choice.

    scores: a copy of the rows' logits, float32 [n, V]; overwritten.
    """
    states = [seq.processing for _, seq in choosing]
    for (_, seq), state in zip(choosing, states, strict=True):
        if state is not None:
            state.advance(seq.token_ids)
            seq.error = NOTHING_LEFT if len(state.forbidden) == scores.shape[1] else None
    penalise(scores, states)
    logprobs = ops.log_softmax(scores)
    forbid(logprobs, states)
    sampled = [row for row, (_, seq) in enumerate(choosing) if seq.request.params.temperature > 0]
    if len(sampled) == len(choosing):
        return _sample(ops, choosing, logprobs)
    tokens = sampling.argmax_lowest(logprobs)
    if sampled:
        (rows,) = upload([np.array(sampled)], ops.device)
        tokens[rows] = _sample(ops, [choosing[row] for row in sampled], logprobs[rows])
    return tokens


def _sample(ops: Ops, choosing: list[tuple[SequenceShare, Generating]], logprobs: Tensor) -> Tensor:
    """A sampled token of each row, int64 [n], by its request's temperature, top-k, top-p and noise.

    logprobs: float32 [n, V].
    """
    params = [seq.request.params for _, seq in choosing]
    keys = np.array([seq.noise_key for _, seq in choosing], dtype=np.int64)
    # The position that each new token will have.
    positions = np.array([part.positions.stop for part, _ in choosing], dtype=np.int64)
    return sampling.sample(
        logprobs,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        *upload([keys, positions], ops.device),
    )
