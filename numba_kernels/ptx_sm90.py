"""One function per instruction, named after it: what sm_90 adds. Twin: cuda_src/ptx_sm90.cuh.

It is for tiles that are copied and multiplied in the background. What the instructions do in full:
the PTX ISA document, under each name. Registers are passed as in ptx_sm80.py.
"""

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .ptx_sm80 import assembly, elements, store_fields

_WORD = ir.IntType(32)
_LONG = ir.IntType(64)
_VOID = ir.VoidType()
int32, uint32, uint64 = types.int32, types.uint32, types.uint64


def _statement(text, constraints, *kinds):
    """What generates one instruction without a result, as an intrinsic returns it."""

    def codegen(context, builder, _signature, args):
        assembly(builder, _VOID, text, constraints, args)
        return context.get_dummy_value()

    return types.void(*kinds), codegen


# ------------------------------------------------------------------------------ barriers in memory
#
# An mbarrier counts arrivals and bytes on their way. When `count` threads have arrived and no byte
# is missing, its phase ends and the next one begins. Waiters name the parity of the phase that
# they wait for: 0 for the first. To wait for parity 1 of a fresh barrier is to wait for nothing.


@intrinsic
def mbarrier_init(_typing, _barrier, _count):
    return _statement("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", uint32, int32)


# Makes barriers that were initialised here known to the copy engine.
@intrinsic
def fence_mbarrier_init(_typing):
    return _statement("fence.mbarrier_init.release.cluster;", "")


@intrinsic
def mbarrier_arrive(_typing, _barrier):
    return _statement("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", uint32)


# Arrives, and says that so many bytes are still to come in this phase.
@intrinsic
def mbarrier_arrive_expect_tx(_typing, _barrier, _bytes):
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    return _statement(text, "r,r", uint32, int32)


@intrinsic
def mbarrier_try_wait_parity(_typing, _barrier, _parity):
    def codegen(_context, builder, _signature, args):
        text = (
            "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2; "
            "selp.u32 $0, 1, 0, done;}"
        )
        done = assembly(builder, _WORD, text, "=r,r,r", args)
        return builder.icmp_unsigned("!=", done, _WORD(0))

    return types.boolean(uint32, int32), codegen


@cuda.jit(device=True, forceinline=True)
def mbarrier_wait(barrier, parity):
    done = False
    while not done:  # tested at its end: one instruction, where there would else be two
        done = mbarrier_try_wait_parity(barrier, parity)


# ---------------------------------------------------------------------------------- tensor copies

# What cuTensorMapEncodeTiled makes of an array: its address, shape and strides, and the box that
# one copy takes. A kernel hands it on and never looks into it. As a kernel's parameter it is passed
# by value (workbench/compile.py), and this is its address.
TensorMap = types.CPointer(types.UniTuple(types.uint64, 16))


# Copies the box at (col, row, head, batch) of an array, elements outside of which are 0, and takes
# its bytes off the barrier's count. One thread starts it.
@intrinsic
def cp_async_bulk_tensor_4d(_typing, _shared, _tensor_map, _barrier, _col, _row, _head, _batch):
    text = (
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[$0], [$1, {$3, $4, $5, $6}], [$2];"
    )
    coordinates = (int32, int32, int32, int32)
    return _statement(text, "r,l,r,r,r,r,r", uint32, TensorMap, uint32, *coordinates)


# Copies a box the other way, without what would lie outside of the array. The copy belongs to a
# group of its thread's (cp_async_bulk_commit_group).
@intrinsic
def cp_async_bulk_tensor_4d_store(_typing, _tensor_map, _shared, _col, _row, _head, _batch):
    text = (
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$2, $3, $4, $5}], [$1];"
    )
    return _statement(text, "l,r,r,r,r,r", TensorMap, uint32, int32, int32, int32, int32)


# ------------------------------------------------------------------------- copies of plain memory
#
# Addresses and sizes are multiples of 16 bytes. One thread starts a copy.


# Copies to shared memory, and takes the bytes off the barrier's count.
@intrinsic
def cp_async_bulk(_typing, _shared, source, _bytes, _barrier):
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    return _statement(text, "r,l,r,r", uint32, source, int32, uint32)


# Copies the other way; the copy belongs to a group of its thread's (cp_async_bulk_commit_group).
@intrinsic
def cp_async_bulk_store(_typing, target, _shared, _bytes):
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    return _statement(text, "l,r,r", target, uint32, int32)


# Adds floats in shared memory to those at `target`; each addition is atomic.
@intrinsic
def cp_reduce_async_bulk_add(_typing, target, _shared, _bytes):
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    return _statement(text, "l,r,r", target, uint32, int32)


@intrinsic
def cp_async_bulk_commit_group(_typing):
    return _statement("cp.async.bulk.commit_group;", "")


# Waits until at most GROUPS of this thread's groups are under way; or with _read, until all others
# have read their shared memory.
def cp_async_bulk_wait_group(GROUPS):
    @intrinsic
    def function(_typing):
        return _statement(f"cp.async.bulk.wait_group {GROUPS};", "")

    return function


def cp_async_bulk_wait_group_read(GROUPS):
    @intrinsic
    def function(_typing):
        return _statement(f"cp.async.bulk.wait_group.read {GROUPS};", "")

    return function


# Puts ordinary accesses to shared memory, or to global memory, and those of copies and of wgmmas
# in order, each before this on one side and after it on the other.
@intrinsic
def fence_proxy_async(_typing):
    return _statement("fence.proxy.async.shared::cta;", "")


@intrinsic
def fence_proxy_async_global(_typing):
    return _statement("fence.proxy.async.global;", "")


# Stores four 8 x 8 matrices of 16-bit elements, as ldmatrix_x4 (ptx_sm80.py) loads them.
@intrinsic
def stmatrix_x4(_typing, _shared, r, _r_index):
    def codegen(context, builder, _signature, args):
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        words = [builder.load(x) for x in elements(context, builder, r, *args[1:], 4)]
        assembly(builder, _VOID, text, "r,r,r,r,r", [args[0], *words])
        return context.get_dummy_value()

    return types.void(uint32, r, types.int64), codegen


# -------------------------------------------------------------------------- products of warpgroups
#
# A wgmma multiplies a 64 x 16 by a 16 x N tile for the 128 threads of a warpgroup, in the
# background: between wgmma_commit_group and a wgmma_wait_group that leaves fewer groups under way,
# nobody may touch its registers or shared memory. Accumulators lie as those of mma_m16n8k16
# (ptx_sm80.py), 16 rows a warp.


@intrinsic
def wgmma_fence(_typing):
    return _statement("wgmma.fence.sync.aligned;", "")


@intrinsic
def wgmma_commit_group(_typing):
    return _statement("wgmma.commit_group.sync.aligned;", "")


def wgmma_wait_group(GROUPS):
    @intrinsic
    def function(_typing):
        return _statement(f"wgmma.wait_group.sync.aligned {GROUPS};", "")

    return function


# Keeps the waits that follow behind the instructions that x comes from. Without it they are moved
# to the front, since nothing there waits for them, and what was to be done meanwhile is done
# afterwards. No x is below -inf: nothing is ever stored.
@intrinsic
def pin(_typing, _x):
    text = (
        "{.reg .pred never; .reg .b32 nowhere; setp.lt.f32 never, $0, 0fFF800000; "
        "mov.b32 nowhere, 0; @never st.shared.f32 [nowhere], $0;}"
    )
    return _statement(text, "f", types.float32)


# Keeps the compiler from moving what reads or writes N registers over this place.
def register_fence(N):
    @intrinsic
    def function(_typing, x, _x_index):
        def codegen(context, builder, _signature, args):
            target = elements(context, builder, x, *args, N)
            values = [builder.load(element) for element in target]
            letter = "f" if x.dtype == types.float32 else "r"
            constraints = ",".join([f"={letter}"] * N + [str(i) for i in range(N)])
            same = ir.LiteralStructType([value.type for value in values])
            store_fields(builder, assembly(builder, same, "", constraints, values), target)
            return context.get_dummy_value()

        return types.void(x, types.int64), codegen

    return function


# x, of which the compiler now knows nothing: what a loop makes of it is made in the loop, and not
# ahead of it, to be kept in registers.
@intrinsic
def opaque(_typing, _x):
    def codegen(_context, builder, _signature, args):
        return assembly(builder, _WORD, "", "=r,0", args)

    return types.uint32(uint32), codegen


# A copy of N registers, to be read while a product reads `x`. The compiler cannot see that it is
# one, or it would have `x` itself read; ptxas, which may do that, makes no instruction of it.
def register_copy(N):
    @intrinsic
    def function(_typing, copy, _copy_index, x, _x_index):
        def codegen(context, builder, _signature, args):
            target = elements(context, builder, copy, *args[:2], N)
            for to, source in zip(target, elements(context, builder, x, *args[2:], N), strict=True):
                word = builder.load(source)
                builder.store(assembly(builder, _WORD, "mov.b32 $0, $1;", "=r,r", [word]), to)
            return context.get_dummy_value()

        return types.void(copy, types.int64, x, types.int64), codegen

    return function


# Where an operand lies in shared memory: tiles of rows of 128 bytes, swizzled as in fragments.py,
# the first at a multiple of 1024 bytes. Eight rows are 1024 bytes. Of an operand whose rows are
# the sums' axis (V), `leading` is the distance from 64 of its columns to the next 64. This is the
# lower half of its descriptor.
@cuda.jit(device=True, forceinline=True)
def wgmma_address(shared, leading):
    return uint32(uint32(leading >> 4) << 16 | uint32(shared & 0x3FFFF) >> 4)


# The descriptor of what lies `offset` bytes on. No address carries out of its field, so that the
# steps of a product are one addition apart: there is hardly time for more between two wgmmas.
@intrinsic
def wgmma_descriptor(_typing, _address, _offset):
    def codegen(_context, builder, _signature, args):
        address, offset = args
        swizzle_128, stride = 1 << 62, (1024 >> 4) << 32
        lower = builder.add(address, builder.lshr(offset, _WORD(4)))
        return builder.or_(_LONG(swizzle_128 | stride), builder.zext(lower, _LONG))

    return types.uint64(uint32, int32), codegen


# The descriptor of an operand that is not swizzled: of its 8 x 8 matrices, each in 128 bytes, the
# next one along the sums' axis is `leading` bytes on, and the next one across it `stride`.
@cuda.jit(device=True, forceinline=True)
def wgmma_plain_descriptor(shared, leading, stride):
    lower = uint32(uint32(leading >> 4) << 16 | uint32(shared & 0x3FFFF) >> 4)
    return uint64(uint64(stride >> 4) << 32 | lower)


# acc (+)= a b, where a is 64 x 16 and b 16 x N. Both lie in shared memory with the sums' axis along
# their rows (ss); or b has the sums' axis down its columns, and a is in shared memory (ss_trans_b)
# or in registers, as those of mma_m16n8k16 (rs). Without `accumulate` what acc held is forgotten.
def _wgmma(context, builder, T, N, acc, a, a_constraints, b, accumulate, flags):
    kind = "f16" if types.float16 == T else "bf16"
    count, b_at = N // 2, N // 2 + len(a)
    names = ", ".join(f"${i}" for i in range(count))
    a_names = ", ".join(f"${count + i}" for i in range(len(a)))
    if len(a) > 1:
        a_names = f"{{{a_names}}}"
    text = (  # a predicate cannot be an operand of inline assembly
        f"{{.reg .pred accumulate; setp.ne.b32 accumulate, ${b_at + 1}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.{kind}.{kind} {{{names}}}, "
        f"{a_names}, ${b_at}, accumulate, {flags};}}"
    )
    tied = [str(i) for i in range(count)]
    constraints = ",".join(["=f"] * count + a_constraints + ["l", "r"] + tied)
    sums = [builder.load(element) for element in acc]
    operands = [*a, b, builder.zext(accumulate, _WORD), *sums]
    floats = ir.LiteralStructType([ir.FloatType()] * count)
    store_fields(builder, assembly(builder, floats, text, constraints, operands), acc)
    return context.get_dummy_value()


def wgmma_ss(T, N):
    @intrinsic
    def function(_typing, acc, _acc_index, _a, _b, _accumulate):
        def codegen(context, builder, _signature, args):
            target = elements(context, builder, acc, *args[:2], N // 2)
            a, b, accumulate = args[2:]
            flags = "1, 1, 0, 0"
            return _wgmma(context, builder, T, N, target, [a], ["l"], b, accumulate, flags)

        descriptors = (types.uint64, types.uint64)
        return types.void(acc, types.int64, *descriptors, types.boolean), codegen

    return function


def wgmma_ss_trans_b(T, N):
    @intrinsic
    def function(_typing, acc, _acc_index, _a, _b, _accumulate):
        def codegen(context, builder, _signature, args):
            target = elements(context, builder, acc, *args[:2], N // 2)
            a, b, accumulate = args[2:]
            flags = "1, 1, 0, 1"
            return _wgmma(context, builder, T, N, target, [a], ["l"], b, accumulate, flags)

        descriptors = (types.uint64, types.uint64)
        return types.void(acc, types.int64, *descriptors, types.boolean), codegen

    return function


def wgmma_rs(T, N):
    @intrinsic
    def function(_typing, acc, _acc_index, a, _a_index, _b, _accumulate):
        def codegen(context, builder, _signature, args):
            target = elements(context, builder, acc, *args[:2], N // 2)
            words = [builder.load(x) for x in elements(context, builder, a, *args[2:4], 4)]
            b, accumulate = args[4:]
            flags = "1, 1, 1"
            return _wgmma(context, builder, T, N, target, words, ["r"] * 4, b, accumulate, flags)

        operands = (a, types.int64, types.uint64)
        return types.void(acc, types.int64, *operands, types.boolean), codegen

    return function


# acc (+)= a b, where both lie in shared memory with the sums' axis down their columns: the
# transpose of a 16 x 64 tile times a 16 x 64 tile.
def wgmma_ss_trans(T):
    @intrinsic
    def function(_typing, acc, _acc_index, _a, _b, _accumulate):
        def codegen(context, builder, _signature, args):
            target = elements(context, builder, acc, *args[:2], 32)
            a, b, accumulate = args[2:]
            flags = "1, 1, 1, 1"
            return _wgmma(context, builder, T, 64, target, [a], ["l"], b, accumulate, flags)

        descriptors = (types.uint64, types.uint64)
        return types.void(acc, types.int64, *descriptors, types.boolean), codegen

    return function


# -------------------------------------------------------------------------------- warps and roles


# Hands the registers of this warpgroup over what `COUNT` a thread leave, or takes so many.
def setmaxnreg_dec(COUNT):
    @intrinsic
    def function(_typing):
        return _statement(f"setmaxnreg.dec.sync.aligned.u32 {COUNT};", "")

    return function


def setmaxnreg_inc(COUNT):
    @intrinsic
    def function(_typing):
        return _statement(f"setmaxnreg.inc.sync.aligned.u32 {COUNT};", "")

    return function


# Barrier `id` (1 to 15) of a block: opens when so many threads have come. Who arrives goes on.
@intrinsic
def bar_sync(_typing, _id, _threads):
    return _statement("bar.sync $0, $1;", "r,r", int32, int32)


@intrinsic
def bar_arrive(_typing, _id, _threads):
    return _statement("bar.arrive $0, $1;", "r,r", int32, int32)
