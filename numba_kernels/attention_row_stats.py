"""attention_row_stats: what Hopper's backwards subtract for a query row, and counters for them.

  delta[row] = rowsum(dout * out) - dlse[row]
  stats[tile] = -lse / scale of its rows, then -delta of its rows
  turns = 0

Sums of q k^T and of dout v^T start from those (warpgroups, start_nt_from). Then no thread reads
them, which would take a twelfth of the time of shared memory, what bounds those kernels. Each is
the sum of three bfloat16, in 16 bytes: they hold the 24 bits of a float. Rows are padded to
whole tiles: there, and where a row sees no key, scores are hidden whatever lse is.

Work split:    HEAD_DIM / 8 threads take a row, 16 bytes each, and add up by shuffles
Shared memory: none
Registers:     a handful
Twin:          cuda_src/attention_row_stats.cu
Launched by:   workbench/launchers.py, attention_flash_wgmma, first of its backward
"""

from numba import cuda
from numba.cuda import types

from .common import (
    acc_t,
    advance,
    cdiv,
    div,
    is_null,
    load16,
    offset_of,
    reinterpret,
    rem,
    store16,
    to_acc,
    warp_sum,
)
from .ptx_sm80 import cvt_first, cvt_rn_x2, griddepcontrol_launch_dependents

round_pair, first_of_pair = cvt_rn_x2(types.bfloat16), cvt_first(types.bfloat16)


# Three bfloat16 that add up to x, and zeros.
@cuda.jit(device=True, forceinline=True)
def store_three_bfloat16(to, x):
    term = cuda.local.array(3, types.uint32)
    for i in range(3):
        term[i] = round_pair(x, types.float32(0))
        x -= first_of_pair(term[i])
    words = cuda.local.array(4, types.uint32)
    words[0] = term[0] | term[1] << 16
    words[1] = term[2]
    words[2] = 0
    words[3] = 0
    store16(to, 0, words, 0)


def attention_row_stats(T, BLOCK_M, HEAD_DIM, ADDERS):
    LANES = HEAD_DIM // 8
    Acc, float32, int32, int64, uint32 = (
        acc_t(T), types.float32, types.int32, types.int64, types.uint32,
    )  # fmt: skip

    @cuda.jit
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        lse,  # (batch, heads_q, seqlen_q), contiguous
        dlse,  # the same, or null
        stats,  # (batch, heads_q, query tiles, BLOCK_M * 8)
        turns,  # 1 + (ADDERS, batch, heads_q, query tiles)
        dout_strides,
        out_strides,
        batch,
        heads_q,
        seqlen_q,
        head_dim_v,
        scale,
    ):
        griddepcontrol_launch_dependents()
        # Each index has 32 bytes of dq_acc: 2^32 fit nowhere.
        index = uint32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        rows = uint32(cdiv(uint32(seqlen_q), BLOCK_M) * BLOCK_M)
        row = uint32(rem(uint32(div(index, LANES)), rows))
        head = uint32(div(uint32(div(index, LANES)), rows))  # of all batches
        if head >= batch * heads_q:  # the whole warp
            return
        col = int32(rem(index, LANES) * 8)

        # 1. delta = rowsum(dout * out)
        total = float32(0)
        if row < seqlen_q:
            batch_index = uint32(div(head, uint32(heads_q)))
            its_head = uint32(rem(head, uint32(heads_q)))
            dout = advance(dout, offset_of(dout_strides, batch_index, its_head, row) + col)
            out = advance(out, offset_of(out_strides, batch_index, its_head, row) + col)
            if col + 8 <= head_dim_v:
                x = cuda.local.array(8, Acc)
                y = cuda.local.array(8, Acc)
                load16(x, 0, dout, 0)
                load16(y, 0, out, 0)
                for i in range(8):
                    total += x[i] * y[i]
            else:
                i = int32(0)
                while col + i < head_dim_v:
                    total += to_acc(dout[i]) * to_acc(out[i])
                    i = int32(i + 1)
        total = warp_sum(total, LANES)

        # 2. Store
        if col != 0:
            return
        tile = uint32(div(div(index, LANES), BLOCK_M))
        tiles = uint32(uint32(batch * heads_q) * div(rows, BLOCK_M))
        in_tile = uint32(rem(row, BLOCK_M))
        if index == 0:
            turns[0] = 0
        if in_tile < ADDERS:
            turns[1 + in_tile * tiles + tile] = 0
        lse_over_scale = float32(0)
        if row < seqlen_q:
            at = int64(head) * seqlen_q + row
            lse_over_scale = lse[at] / float32(scale)
            if not is_null(dlse):
                total -= dlse[at]
        of_tile = reinterpret(uint32, stats)
        of_tile = advance(of_tile, int64(tile) * (BLOCK_M * 8))
        of_tile = advance(of_tile, in_tile * 4)
        store_three_bfloat16(of_tile, -lse_over_scale)
        store_three_bfloat16(advance(of_tile, BLOCK_M * 4), -total)

    return kernel
