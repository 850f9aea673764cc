"""attention_delta: what every backward subtracts from dp, computed once.

  delta[row] = rowsum(dout * out) - dlse[row]

Work split:    a warp takes a row: its lanes read neighbouring elements, then add up by shuffles
Shared memory: none
Registers:     a handful
Twin:          cuda_src/attention_delta.cu
Launched by:   workbench/launchers.py, first of every backward but attention_flash_wgmma's
"""

from numba import cuda
from numba.cuda import types

from .common import acc_t, advance, cdiv, div, is_null, offset_of, rem, to_acc, warp_sum
from .ptx_sm80 import griddepcontrol_launch_dependents


def attention_delta(T):
    Acc = acc_t(T)
    int64, uint32 = types.int64, types.uint32

    @cuda.jit
    def kernel(
        dout,  # (batch, heads_q, seqlen_q, head_dim_v)
        out,  # (batch, heads_q, seqlen_q, head_dim_v)
        dlse,  # (batch, heads_q, seqlen_q), or null
        delta,  # (batch, heads_q, seqlen_q)
        dout_strides,
        out_strides,
        batch,  # noqa: ARG001 (all attention kernels take the same sizes)
        heads_q,
        seqlen_q,
        head_dim_v,
    ):
        griddepcontrol_launch_dependents()
        # A block is of one head: so no division is of 64 bits, which takes a hundred instructions.
        warps = uint32(cuda.blockDim.x >> 5)
        blocks = uint32(cdiv(uint32(seqlen_q), warps))
        block, thread = uint32(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        head = uint32(div(block, blocks))  # of all batches
        row = uint32(rem(block, blocks) * warps + (thread >> 5))
        lane_id = cuda.threadIdx.x & 31
        if row >= seqlen_q:  # the whole warp
            return
        batch_index = uint32(div(head, uint32(heads_q)))
        its_head = uint32(rem(head, uint32(heads_q)))
        dout = advance(dout, offset_of(dout_strides, batch_index, its_head, row))
        out = advance(out, offset_of(out_strides, batch_index, its_head, row))

        # 1. delta = rowsum(dout * out)
        total = Acc(0)
        for d in range(lane_id, head_dim_v, 32):
            total += to_acc(dout[d]) * to_acc(out[d])
        total = warp_sum(total)
        at = int64(head) * seqlen_q + row
        if lane_id == 0:
            delta[at] = total if is_null(dlse) else total - dlse[at]

    return kernel
