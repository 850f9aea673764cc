"""attention_dq: rounds the sum that a backward on tensor cores has formed, and puts it in rows.

  dq = scale * dq_acc, or 0 in a query tile to which nobody has added

Of several adders' counters (turns) the first one's are read: all have added to the same tiles.
dq_acc holds accumulators of 16 x 8 (ptx_sm80.cuh, mma_m16n8k16), four floats of each lane after
each other: so every addition to it was one access, and the lanes' accesses lay side by side.

Work split:    a thread takes two rows, 8 apart, of an accumulator: 16 floats after each other
Shared memory: none
Registers:     a handful
Twin:          cuda_src/attention_dq.cu
Launched by:   workbench/launchers.py, attention_flash_mma and attention_flash_wgmma
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, advance, cdiv, div, from_acc, is_null, load16, offset_of, rem, store16
from .ptx_sm80 import griddepcontrol_wait


def attention_dq(T, BLOCK_M, HEAD_DIM):
    Acc = acc_t(T)
    int64, uint32 = types.int64, types.uint32
    ACROSS = HEAD_DIM // 8  # accumulators beside each other

    @cuda.jit
    def kernel(
        dq_acc,  # (batch, heads_q, query tiles, BLOCK_M, ..)
        turns,  # 1 + (.., batch, heads_q, query tiles), or null
        dq,  # (batch, heads_q, seqlen_q, head_dim)
        dq_strides,
        batch,
        heads_q,
        seqlen_q,
        head_dim,
        scale,
    ):
        x = cuda.local.array(16, Acc)
        y = cuda.local.array(8, Acc)
        # Each index is of 64 bytes: 2^32 fit nowhere.
        index = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        accumulator = uint32(index >> 3)
        down = uint32(cdiv(uint32(seqlen_q), BLOCK_M) * (BLOCK_M // 16))  # below each other
        line = uint32(div(accumulator, ACROSS))
        row = uint32(rem(line, down) * 16 + (index & 7))
        col = uint32(rem(accumulator, ACROSS) * 8)
        head = uint32(div(line, down))  # of all batches
        if head >= batch * heads_q or col >= head_dim:
            return
        batch_index = uint32(div(head, uint32(heads_q)))
        its_head = uint32(rem(head, uint32(heads_q)))
        dq = advance(dq, offset_of(dq_strides, batch_index, its_head, row) + col)

        # 1. dq = scale * dq_acc
        griddepcontrol_wait()  # for the sum
        for i in range(16):
            x[i] = 0
        tile = uint32(div(line, BLOCK_M // 16))
        if is_null(turns) or turns[1 + tile] > 0:
            for lane in range(4):
                load16(x, 4 * lane, dq_acc, int64(index) * 16 + 4 * lane)
        for half in range(2):
            for i in range(8):
                y[i] = x[(i >> 1) * 4 + 2 * half + (i & 1)] * Acc(scale)
            if row + 8 * half < seqlen_q:
                to = advance(dq, 8 * half * dq_strides.row)
                if col + 8 <= head_dim:
                    store16(to, 0, y, 0)
                else:
                    for i in range(8):
                        if col + i < head_dim:
                            to[i] = from_acc(T, y[i])

    return kernel
