"""The tokens that the last launched step chose, where the next one takes them: on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from evalengine.layers.kernel_support import kernel_problems


class LastTokens:
    """A row for every sequence whose token the last step chooses (`Sequence.device_row`).

    A step that is launched before these tokens are known on the host refers to row r by the token id -1 - r.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._has_kernel = not kernel_problems(device)

    def put(self, tokens: Tensor) -> None:
        """Keeps the tokens, int64 [n], of rows 0 ... n - 1."""
        self.tokens[: len(tokens)].copy_(tokens)

    def resolve(self, ids: Tensor) -> Tensor:
        """Token ids in place of the references among `ids`, int64 [T]. A row whose logits were not finite holds
        `vocab_size`, which becomes the largest id."""
        if self._has_kernel:
            from evalengine.kernels.last_tokens import resolve

            return resolve(ids, self.tokens, self._vocab_size - 1)
        token_ids = torch.where(ids < 0, self.tokens[(-1 - ids).clamp_(min=0)], ids)
        return token_ids.clamp_(max=self._vocab_size - 1)
