"""Windows over a text that is longer than the model's context, each token scored exactly once.

The scheme is lm-eval's (`get_rolling_token_windows` made disjoint, context_len 1): the first window predicts up to
`max_len` tokens from the prefix token, each next window predicts up to `max_len` new tokens, and the last one keeps a
full-size context and scores only the remainder.
"""

from __future__ import annotations


def rolling_windows(token_ids: list[int], prefix_token_id: int, max_len: int) -> list[tuple[list[int], list[int]]]:
    """Pairs (context, continuation) of at most max_len + 1 tokens together; none for an empty text."""
    ids = [prefix_token_id, *token_ids]
    windows = []
    done = 0  # how many tokens of the text are scored
    while done < len(token_ids):
        end = min(done + max_len, len(token_ids))
        # The inputs ids[first : end] predict ids[first + 1 : end + 1], of which ids[done + 1 : end + 1] are new.
        first = max(end - max_len, 0)
        windows.append((ids[first : done + 1], ids[done + 1 : end + 1]))
        done = end
    return windows
