"""Answers kept between runs: a request that was answered once is read, not computed.

Under invariant numerics an answer is a pure function of what computes it and of what is asked (`engine.Keys`), so that
a kept one is the very bytes that would be computed again.
"""
