"""attention_delta: what every backward subtracts from dp, computed once.

  delta[row] = rowsum(dout * out) - dlse[row]

Work split:    a warp takes a row: its lanes read neighbouring elements, then add up by shuffles
Shared memory: none
Registers:     a handful
Twin:          cuda_src/attention_delta.cu
Launched by:   workbench/launchers.py, first of every backward
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, advance, div, is_null, offset_of, rem, to_acc, warp_sum
from .ptx_sm80 import griddepcontrol_launch_dependents


def attention_delta(T):
    Acc = acc_t(T)
    int64 = types.int64

    @cuda.jit
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        dlse,  # (batch, heads_q, seqlen_q), or null
        delta,  # (batch, heads_q, seqlen_q)
        dout_strides,
        out_strides,
        batch,
        heads_q,
        seqlen_q,
        head_dim_v,
    ):
        griddepcontrol_launch_dependents()
        warp = (int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x) >> 5
        lane_id = cuda.threadIdx.x & 31
        if warp >= batch * heads_q * seqlen_q:  # the whole warp
            return
        row = rem(warp, seqlen_q)
        head = rem(div(warp, seqlen_q), heads_q)
        batch_index = div(div(warp, seqlen_q), heads_q)
        dout = advance(
            dout,
            offset_of(dout_strides, batch_index, head, row),
        )
        out = advance(out, offset_of(out_strides, batch_index, head, row))

        # 1. delta = rowsum(dout * out)
        total = Acc(0)
        for d in range(lane_id, head_dim_v, 32):
            total += to_acc(dout[d]) * to_acc(out[d])
        total = warp_sum(total)
        if lane_id == 0:
            delta[warp] = total if is_null(dlse) else total - dlse[warp]

    return kernel
