"""Answers cached between runs: a request that was answered once is read, not computed.

Under invariant numerics an answer is a pure function of what computes it and of the request (`engine.Keys`), so that a
stored answer has the bytes that would be computed again.
"""
