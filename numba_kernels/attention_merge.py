"""attention_merge: one result from partial ones over disjoint keys.

  lse = log(sum(exp(lse_parts))),  out = sum(exp(lse_parts - lse) * out_parts)

Work split:    a block takes a row of out; its threads share the columns, four each, and the
               parts, which they merge among themselves in the end
Shared memory: a row, its maximum and its sum from each group of threads
Registers:     a handful
Twin:          cuda_src/attention_merge.cu
Launched by:   workbench/launchers.py, attention_flash_mma
"""

import math

from numba import cuda
from numba.cuda import types

from .common import INF, acc_t, advance, div, exp_of, from_acc, load16, offset_of, rem, store16
from .ptx_sm80 import griddepcontrol_wait
from .scores import finite_or_zero


def attention_merge(T, HEAD_DIM_V, THREADS):
    Acc = acc_t(T)
    int64, uint32 = types.int64, types.uint32
    COLS = HEAD_DIM_V // 4  # threads across
    GROUPS = THREADS // COLS  # that take parts in turn
    AT_ONCE = 8  # parts under way a thread
    ROWS, PARTS = (GROUPS, HEAD_DIM_V), (AT_ONCE, 4)

    @cuda.jit(launch_bounds=THREADS)
    def kernel(
        out_parts,  # (splits, batch, heads_q, seqlen_q, HEAD_DIM_V)
        lse_parts,  # (splits, batch, heads_q, seqlen_q)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        out_strides,
        batch,
        heads_q,
        seqlen_q,
        head_dim_v,
        splits,
    ):
        row_max = cuda.shared.array(GROUPS, Acc)
        row_sum = cuda.shared.array(GROUPS, Acc)
        rows = cuda.shared.array(ROWS, Acc, 16)
        acc = cuda.local.array(4, Acc)
        part_lse = cuda.local.array(AT_ONCE, Acc)
        part = cuda.local.array(PARTS, Acc)
        row, rows_total = int64(cuda.blockIdx.x), batch * heads_q * seqlen_q
        tid = uint32(cuda.threadIdx.x)
        group, col = uint32(div(tid, COLS)), uint32(rem(tid, COLS) * 4)

        # 1. Merge the parts of each group
        griddepcontrol_wait()  # for them
        if group < GROUPS:
            most, total = Acc(-INF), Acc(0)
            for j in range(4):
                acc[j] = 0
            first = int64(group)
            while first < splits:
                new_max = most
                for i in range(AT_ONCE):  # all loads before the first use
                    index = first * rows_total + row + i * (GROUPS * rows_total)
                    for j in range(4):
                        part[i, j] = 0
                    part_lse[i] = -INF
                    if first + i * GROUPS < splits:
                        part_lse[i] = lse_parts[index]
                        load16(part, i * 4, out_parts, index * HEAD_DIM_V + col)
                for i in range(AT_ONCE):
                    new_max = max(new_max, part_lse[i])
                subtrahend = finite_or_zero(new_max)
                rescale = exp_of(most - subtrahend)
                most = new_max
                total *= rescale
                for j in range(4):
                    acc[j] *= rescale
                for i in range(AT_ONCE):
                    weight = exp_of(part_lse[i] - subtrahend)
                    total += weight
                    for j in range(4):
                        acc[j] += weight * part[i, j]
                first += AT_ONCE * GROUPS
            store16(rows, group * HEAD_DIM_V + col, acc, 0)
            if col == 0:  # all threads of the group have the same
                row_max[group] = most
                row_sum[group] = total
        cuda.syncthreads()

        # 2. Merge the groups
        head = uint32(div(uint32(row), uint32(seqlen_q)))  # of all batches
        batch_index = uint32(div(head, uint32(heads_q)))
        its_head = uint32(rem(head, uint32(heads_q)))
        its_row = uint32(rem(uint32(row), uint32(seqlen_q)))
        out = advance(out, offset_of(out_strides, batch_index, its_head, its_row))
        most, total = Acc(-INF), Acc(0)
        for g in range(GROUPS):
            most = max(most, row_max[g])
        subtrahend = finite_or_zero(most)
        for g in range(GROUPS):
            total += exp_of(row_max[g] - subtrahend) * row_sum[g]
        d = int64(cuda.threadIdx.x)
        while d < head_dim_v:
            x = Acc(0)
            for g in range(GROUPS):
                x += exp_of(row_max[g] - subtrahend) * rows[g, d]
            out[d] = from_acc(T, Acc(0) if total == 0 else x / total)
            d += THREADS
        if cuda.threadIdx.x == 0:
            lse[row] = most + math.log(total)

    return kernel
