"""The sizes that the kernels take. This module imports nothing: machines without Triton read it, too."""

# Terms of one integer row sum (`row_sum`): the longest row of RMSNorm, and a part of a longer row in `mean`.
MAX_TERMS = 1 << 14
HEAD_DIMS = (16, 256)  # the smallest and the largest head_dim of attention, which must be even
MAX_VOCABULARY = 1 << 19  # the largest: so many numbers of 44 bits, each at most 1, just add in int64
