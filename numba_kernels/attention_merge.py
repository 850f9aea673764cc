"""attention_merge: one result from partial ones over disjoint keys.

  lse = log(sum(exp(lse_parts))),  out = sum(exp(lse_parts - lse) * out_parts)

Work split:    a thread takes an element of out and adds up all of its parts
Shared memory: none
Registers:     a handful
Twin:          cuda_src/attention_merge.cu
Launched by:   workbench/launchers.py, attention_flash_mma
"""

import math

from numba import cuda
from numba.cuda import types

from .common import INF, acc_t, advance, div, exp_of, from_acc, offset_of, rem
from .scores import finite_or_zero


def attention_merge(T, HEAD_DIM_V):
    Acc = acc_t(T)
    int64 = types.int64

    @cuda.jit
    def kernel(
        out_parts,  # (splits, rows of out, HEAD_DIM_V)
        lse_parts,  # (splits, rows of out)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        out_strides,
        batch,
        heads_q,
        seqlen_q,
        head_dim_v,
        splits,
    ):
        index = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        rows = batch * heads_q * seqlen_q
        row = div(index, HEAD_DIM_V)
        col = rem(index, HEAD_DIM_V)
        if row >= rows or col >= head_dim_v:
            return

        # 1. lse = log(sum(exp(lse_parts)))
        most, total, acc = Acc(-INF), Acc(0), Acc(0)
        split = 0
        while split < splits:
            most = max(most, lse_parts[split * rows + row])
            split += 1
        subtrahend = finite_or_zero(most)

        # 2. out = sum(exp(lse_parts - lse) * out_parts)
        split = 0
        while split < splits:
            weight = exp_of(lse_parts[split * rows + row] - subtrahend)
            total += weight
            acc += weight * out_parts[split * rows * HEAD_DIM_V + index]
            split += 1
        head = div(row, seqlen_q)  # of all batches
        out_row = offset_of(out_strides, div(head, heads_q), rem(head, heads_q), rem(row, seqlen_q))
        out = advance(out, out_row)
        out[col] = from_acc(T, Acc(0) if total == 0 else acc / total)
        if col == 0:
            lse[row] = most + math.log(total)

    return kernel
