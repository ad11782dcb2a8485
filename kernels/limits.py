"""The sizes that the Triton kernels take. Machines without Triton ask for them too, so nothing is imported here."""

MAX_TERMS = 1 << 14  # of one integer row sum (`row_sum`), and so of a row of RMSNorm; a part of a longer row in `mean`
HEAD_DIMS = (16, 256)  # the smallest and the largest head_dim of attention, which must be even
