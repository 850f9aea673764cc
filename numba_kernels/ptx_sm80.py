"""One function per instruction, named after it. Twin: cuda_src/ptx_sm80.cuh.

Asynchronous copies and tensor cores as of sm_80, the ordered loads and stores that blocks use to
wait for each other (sm_70), and what launches wait for each other with (sm_90). What they do in
full: the PTX ISA document, under each name.

Where C++ passes an array of registers, there is an array (cuda.local.array) and the index of the
first element that takes part, counted through all of its axes.
"""

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.core.targetconfig import ConfigStack
from numba.cuda.extending import intrinsic

from .common import to_acc

_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_VOID = ir.VoidType()
_SHARED = 3  # NVVM's number of the address space


def assembly(builder, result, text, constraints, args):
    """One instruction that the compiler may neither drop nor move over accesses to memory."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    constraints = ",".join(filter(None, (constraints, "~{memory}")))
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), args)


def _arithmetic(builder, result, text, constraints, args):
    """One instruction that only computes its result."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=False), args)


def elements(context, builder, array_type, array, index, count):
    """The addresses of array[index], array[index + 1], ..."""
    first = builder.gep(context.make_array(array_type)(context, builder, array).data, [index])
    return [builder.gep(first, [_WORD(i)]) for i in range(count)]


def store_fields(builder, struct, addresses):
    for i, address in enumerate(addresses):
        builder.store(builder.extract_value(struct, i), address)


@intrinsic
def shared_address(_typing, shared, _index):
    """The 32-bit address of shared[index], an array in shared memory."""

    def codegen(context, builder, signature, args):
        pointer = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.gep(pointer, [args[1]])
        pointer = builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(_SHARED))
        return builder.ptrtoint(pointer, _WORD)

    return types.uint32(shared, types.int64), codegen


# Copies BYTES (4, 8 or 16) from global to shared memory without passing through registers; both
# addresses must be multiples of BYTES. Where exists is false nothing is read and zeros are
# written. The copy is done for the thread that started it after cp_async_wait_all,
# for others only after a barrier that follows.
def cp_async(BYTES):
    level = "cg" if BYTES == 16 else "ca"  # past L1: nobody else on this multiprocessor wants it

    @intrinsic
    def function(_typing, shared, source, exists):
        def codegen(context, builder, _signature, args):
            text = (  # a predicate cannot be an operand of inline assembly
                "{.reg .pred absent; setp.eq.s32 absent, $2, 0; "
                f"cp.async.{level}.shared.global [$0], [$1], {BYTES}, absent;}}"
            )
            exists_word = builder.zext(args[2], _WORD)
            assembly(builder, _VOID, text, "r,l,r", [*args[:2], exists_word])
            return context.get_dummy_value()

        return types.void(types.uint32, source, types.boolean), codegen

    return function


@intrinsic
def cp_async_wait_all(_typing):
    def codegen(context, builder, _signature, args):
        assembly(builder, _VOID, "cp.async.wait_all;", "", args)
        return context.get_dummy_value()

    return types.void(), codegen


# Writes a word four times; the address must be a multiple of 16.
@intrinsic
def st_shared_x4(_typing, _shared, _word):
    def codegen(context, builder, _signature, args):
        assembly(builder, _VOID, "st.shared.v4.u32 [$0], {$1, $1, $1, $1};", "r,r", args)
        return context.get_dummy_value()

    return types.void(types.uint32, types.uint32), codegen


# What another block wrote before its st_release is seen after an ld_acquire that reads its value.
@intrinsic
def ld_acquire(_typing, pointer):
    def codegen(_context, builder, _signature, args):
        return assembly(builder, _WORD, "ld.acquire.gpu.s32 $0, [$1];", "=r,l", args)

    return types.int32(pointer), codegen


@intrinsic
def st_release(_typing, pointer, value):
    def codegen(context, builder, _signature, args):
        assembly(builder, _VOID, "st.release.gpu.s32 [$0], $1;", "l,r", args)
        return context.get_dummy_value()

    return types.void(pointer, types.int32), codegen


# Puts `value` where `expected` is, and returns what was there; acquires as ld_acquire does.
@intrinsic
def atom_cas_acquire(_typing, pointer, _expected, _value):
    def codegen(_context, builder, _signature, args):
        text = "atom.acquire.gpu.global.cas.b32 $0, [$1], $2, $3;"
        return assembly(builder, _WORD, text, "=r,l,r,r", args)

    return types.int32(pointer, types.int32, types.int32), codegen


# Adds one and returns what was there.
@intrinsic
def atom_inc(_typing, pointer):
    def codegen(_context, builder, _signature, args):
        return assembly(builder, _WORD, "atom.global.add.s32 $0, [$1], 1;", "=r,l", args)

    return types.int32(pointer), codegen


# A launch may be allowed to start before the one in front of it has ended. From
# griddepcontrol_launch_dependents on, once every block of the first has come there, the second
# may; griddepcontrol_wait waits until the first has ended and all that it wrote is there. All in
# front of the first has ended then too, but only if each of its blocks has waited as well. Before
# sm_90 no launch is so.
@intrinsic
def griddepcontrol_launch_dependents(_typing):
    def codegen(context, builder, _signature, _args):
        if ConfigStack().top().compute_capability >= (9, 0):
            assembly(builder, _VOID, "griddepcontrol.launch_dependents;", "", [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def griddepcontrol_wait(_typing):
    def codegen(context, builder, _signature, _args):
        if ConfigStack().top().compute_capability >= (9, 0):
            assembly(builder, _VOID, "griddepcontrol.wait;", "", [])
        return context.get_dummy_value()

    return types.void(), codegen


# Four 8 x 8 matrices of 16-bit elements from shared memory: lane i points to the 16 bytes of row
# i % 8 of matrix i / 8, and gets the elements marked with its number, two in a register:
#
#     lane |  0   0   1   1   2   2   3   3     register m holds matrix m. With trans the drawing
#          |  4   4   5   5   6   6   7   7     is of the transpose: the lane gets elements below
#          |  ...                               each other.
#          | 28  28  29  29  30  30  31  31
def _ldmatrix(variant):
    @intrinsic
    def function(_typing, r, _r_index, shared):
        def codegen(context, builder, _signature, args):
            text = f"ldmatrix.sync.aligned.m8n8.{variant}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
            words = ir.LiteralStructType([_WORD] * 4)
            loaded = assembly(builder, words, text, "=r,=r,=r,=r,r", args[2:])
            store_fields(builder, loaded, elements(context, builder, r, *args[:2], 4))
            return context.get_dummy_value()

        return types.void(r, types.int64, types.uint32), codegen

    return function


ldmatrix_x4 = _ldmatrix("x4")
ldmatrix_x4_trans = _ldmatrix("x4.trans")


# c += a b on the tensor cores: a is 16 x 16, b 16 x 8, both of type T, and c 16 x 8 of float. With
# g = lane / 4 and t = lane % 4 a lane holds
#
#     a   | a[0]: row g,     columns 2t, 2t + 1 | a[2]: row g,     columns 2t + 8, 2t + 9
#         | a[1]: row g + 8, columns 2t, 2t + 1 | a[3]: row g + 8, columns 2t + 8, 2t + 9
#     b   | b0: rows 2t, 2t + 1, column g       | b1: rows 2t + 8, 2t + 9, column g
#     c   | c[0], c[1]: row g, columns 2t, 2t + 1
#         | c[2], c[3]: row g + 8, the same columns
#
# so two neighbours of c, rounded and packed, are an a; and ldmatrix gives a and b their layout.
def mma_m16n8k16(T):
    kind = "f16" if types.float16 == T else "bf16"

    @intrinsic
    def function(_typing, c, _c_index, a, _a_index, _b0, _b1):
        def codegen(context, builder, _signature, args):
            text = (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
                "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
            )
            target = elements(context, builder, c, *args[:2], 4)
            a_words = [builder.load(x) for x in elements(context, builder, a, *args[2:4], 4)]
            operands = [*a_words, *args[4:], *(builder.load(x) for x in target)]
            floats = ir.LiteralStructType([_FLOAT] * 4)
            constraints = "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"
            sums = _arithmetic(builder, floats, text, constraints, operands)
            store_fields(builder, sums, target)
            return context.get_dummy_value()

        return types.void(c, types.int64, a, types.int64, types.uint32, types.uint32), codegen

    return function


# Two floats rounded to T in one register, the first in its lower half.
def cvt_rn_x2(T):
    kind = "f16x2" if types.float16 == T else "bf16x2"

    @intrinsic
    def function(_typing, _first, _second):
        def codegen(_context, builder, _signature, args):
            return _arithmetic(builder, _WORD, f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f", args)

        return types.uint32(types.float32, types.float32), codegen

    return function


# The first or the second of two elements in a register, as a float.
def _half_as_float(T, shift):
    @intrinsic
    def half(_typing, _pair):
        def codegen(context, builder, _signature, args):
            bits = builder.lshr(args[0], _WORD(shift))
            return builder.trunc(bits, context.get_value_type(T))

        return T(types.uint32), codegen

    @cuda.jit(device=True, forceinline=True)
    def function(pair):
        return to_acc(half(pair))

    return function


def cvt_first(T):
    return _half_as_float(T, 0)


def cvt_second(T):
    return _half_as_float(T, 16)


# 2^x and the logarithm to base 2, right to two units in the last place; subnormal results are 0.
@intrinsic
def ex2_approx(_typing, _x):
    def codegen(_context, builder, _signature, args):
        return _arithmetic(builder, _FLOAT, "ex2.approx.ftz.f32 $0, $1;", "=f,f", args)

    return types.float32(types.float32), codegen


@intrinsic
def lg2_approx(_typing, _x):
    def codegen(_context, builder, _signature, args):
        return _arithmetic(builder, _FLOAT, "lg2.approx.ftz.f32 $0, $1;", "=f,f", args)

    return types.float32(types.float32), codegen


# 1 / x, right to a unit in the last place.
@intrinsic
def rcp_approx(_typing, _x):
    def codegen(_context, builder, _signature, args):
        return _arithmetic(builder, _FLOAT, "rcp.approx.ftz.f32 $0, $1;", "=f,f", args)

    return types.float32(types.float32), codegen


# Adds x to four floats in global memory, in one access from sm_90 on; the address must be a
# multiple of 16. Each addition is atomic.
@intrinsic
def red_add_x4(_typing, target, x, _x_index):
    def codegen(context, builder, _signature, args):
        floats = [builder.load(e) for e in elements(context, builder, x, *args[1:], 4)]
        if ConfigStack().top().compute_capability >= (9, 0):
            text = "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
            assembly(builder, _VOID, text, "l,f,f,f,f", [args[0], *floats])
        else:
            for i, value in enumerate(floats):
                to = builder.gep(args[0], [_WORD(i)])
                assembly(builder, _VOID, "red.global.add.f32 [$0], $1;", "l,f", [to, value])
        return context.get_dummy_value()

    return types.void(target, x, types.int64), codegen
