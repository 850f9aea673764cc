"""Types, constants and small helpers that every kernel uses. Twin: cuda_src/common.cuh.

T is the type arrays are stored in: float32, float64, float16 or bfloat16. Arithmetic is done in
acc_t(T), float64 for float64 and else float32; to_acc(x) and from_acc(T, x) lead there and back.

Pointers are ``types.CPointer(T)``, indexed as in C. A bare number in a kernel is an int64 or a
float64, and int32 arithmetic gives an int64: where the narrow type matters, it is written out.
``range`` is for counts known at compile time, which are unrolled; otherwise it costs a dozen
instructions a turn, so such loops say ``while``.
"""

import math
from collections import namedtuple

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

INF = math.inf
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453

# Distances in elements between neighbours along each axis. Element (b, h, i, j) of an attention
# array lies at b * batch + h * head + i * row + j: the last axis always has stride one.
Strides = namedtuple("Strides", "batch head row")

# The same with a free last axis, for masks and biases; 0 along every axis that is broadcast.
Strides4 = namedtuple("Strides4", "batch head row col")

Shape4 = namedtuple("Shape4", "batch head row col")

_WORD = ir.IntType(32)
_FLOAT = ir.FloatType()
_DOUBLE = ir.DoubleType()


@cuda.jit(device=True, forceinline=True)
def offset_of(strides, batch_index, head, row):
    return batch_index * strides.batch + head * strides.head + row * strides.row


def acc_t(T):
    return types.float64 if types.float64 == T else types.float32


def _convert(context, builder, value, old, new):
    """Cast, without the calls into NVRTC-compiled code that Numba has for bfloat16."""
    if (old, new) == (types.bfloat16, types.float32):
        return builder.bitcast(builder.shl(builder.zext(value, _WORD), _WORD(16)), _FLOAT)
    if (old, new) == (types.float32, types.bfloat16):
        # To nearest, ties to even: add half of the last bit that stays, a little less if it is 0.
        word = builder.bitcast(value, _WORD)
        last_bit = builder.and_(builder.lshr(word, _WORD(16)), _WORD(1))
        rounded = builder.add(word, builder.add(last_bit, _WORD(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", value, value)
        bits = builder.select(is_nan, _WORD(0x7FFF), builder.lshr(rounded, _WORD(16)))
        return builder.trunc(bits, ir.IntType(16))
    return context.cast(builder, value, old, new)


@intrinsic
def to_acc(_typing, x):
    def codegen(context, builder, signature, args):
        return _convert(context, builder, args[0], x, signature.return_type)

    return acc_t(x)(x), codegen


@intrinsic
def from_acc(_typing, T, x):
    def codegen(context, builder, signature, args):
        return _convert(context, builder, args[1], x, signature.return_type)

    return T.instance_type(T, acc_t(T.instance_type)), codegen


@intrinsic
def like(_typing, x, value):
    """Cast value to the type of x: C++ writes Acc(value) where it has deduced Acc."""

    def codegen(context, builder, _signature, args):
        return context.cast(builder, args[1], value, x)

    return x(x, value), codegen


@intrinsic
def is_null(_typing, pointer):
    def codegen(_context, builder, _signature, args):
        return cgutils.is_null(builder, args[0])

    return types.boolean(pointer), codegen


@intrinsic
def advance(_typing, pointer, _count):
    """Where C++ writes pointer + count."""

    def codegen(_context, builder, _signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


@intrinsic
def reinterpret(_typing, T, pointer):
    """Where C++ writes reinterpret_cast<T*>(pointer); of an array it is where that begins."""

    def codegen(context, builder, _signature, args):
        address = _address(context, builder, pointer, args[1], ir.IntType(64)(0))
        return builder.bitcast(address, context.get_value_type(result))

    result = types.CPointer(T.instance_type)
    return result(T, pointer), codegen


@intrinsic
def address_of(_typing, pointer):
    def codegen(_context, builder, _signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.uint64(pointer), codegen


# C's a / b and a % b of numbers >= 0. Python's // and % round down and cost four times as much.
@intrinsic
def div(_typing, _a, _b):
    def codegen(_context, builder, _signature, args):
        return builder.udiv(*args)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def rem(_typing, _a, _b):
    def codegen(_context, builder, _signature, args):
        return builder.urem(*args)

    return types.int64(types.int64, types.int64), codegen


@cuda.jit(device=True, forceinline=True)
def cdiv(a, b):
    return div(a + b - 1, b)


# Blocks go through `at_a_time` heads tile by tile, the same tile of all of these heads after each
# other, and then on to the next heads: so what the blocks of a moment read is little enough to stay
# in the L2 cache. A head (of all batches) and a tile of it.
@cuda.jit(device=True, forceinline=True)
def head_tile(index, tiles, heads_total, at_a_time):
    first_head = types.uint32(div(index, types.uint32(at_a_time * tiles)) * at_a_time)
    heads = types.uint32(min(at_a_time, types.uint32(heads_total - first_head)))
    rest = types.uint32(index - types.uint32(first_head * tiles))
    return types.uint32(first_head + rem(rest, heads)), types.uint32(div(rest, heads))


# exp(x) by the hardware's exp2, right to two units in the last place; below 2^-126 it is 0.
@intrinsic
def exp_of(_typing, x):
    def codegen(_context, builder, _signature, args):
        if x == types.float64:
            exp = ir.FunctionType(_DOUBLE, [_DOUBLE])
            return builder.call(
                cgutils.get_or_insert_function(builder.module, exp, "__nv_exp"), args
            )
        exp2 = ir.InlineAsm(
            ir.FunctionType(_FLOAT, [_FLOAT]),
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            side_effect=False,
        )
        log2e = ir.Constant(_FLOAT, types.float32.cast_python_value(LOG2E))
        return builder.call(exp2, [builder.fmul(args[0], log2e)])

    return x(x), codegen


# Reductions over groups of LANES neighbouring threads of a warp; LANES is a power of two, and
# every lane of the warp must call. Each lane gets the result of its own group.
@cuda.jit(device=True, forceinline=True)
def warp_max(x, LANES=32):
    distance = LANES >> 1
    while distance > 0:
        x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, distance))
        distance >>= 1
    return x


@cuda.jit(device=True, forceinline=True)
def warp_sum(x, LANES=32):
    distance = LANES >> 1
    while distance > 0:
        x += cuda.shfl_xor_sync(0xFFFFFFFF, x, distance)
        distance >>= 1
    return x


# Sixteen bytes of elements, moved by one instruction and converted on the way: x, usually in
# registers (cuda.local.array), is an array of values of type T or acc_t(T), of which vec_length(T)
# from x_index on take part. source and target are pointers or arrays; the addresses of
# source[index] and target[index] must be multiples of 16.
def vec_length(T):
    return 16 // (T.bitwidth // 8)


def _address(context, builder, pointer_type, pointer, index):
    if isinstance(pointer_type, types.Array):
        pointer = context.make_array(pointer_type)(context, builder, pointer).data
    return builder.gep(pointer, [index])


# Always four words of 32 bits: of eight halves the compiler would make two accesses.
_WORDS = ir.VectorType(_WORD, 4)


def _as_words(builder, address):
    return builder.bitcast(address, _WORDS.as_pointer(address.type.addrspace))


@intrinsic
def load16(_typing, x, _x_index, source, _index):
    def codegen(context, builder, _signature, args):
        T = source.dtype
        first = _address(context, builder, x, args[0], args[1])
        address = _address(context, builder, source, args[2], args[3])
        vec = builder.load(_as_words(builder, address), align=16)
        if T.bitwidth != 16:
            vec = builder.bitcast(vec, ir.VectorType(address.type.pointee, vec_length(T)))
        for i in range(vec_length(T)):
            if T.bitwidth == 16:
                word = builder.extract_element(vec, _WORD(i // 2))
                word = builder.lshr(word, _WORD(i % 2 * 16))
                element = builder.trunc(word, address.type.pointee)
            else:
                element = builder.extract_element(vec, _WORD(i))
            element = _convert(context, builder, element, T, x.dtype)
            builder.store(element, builder.gep(first, [_WORD(i)]))
        return context.get_dummy_value()

    return types.void(x, types.int64, source, types.int64), codegen


@intrinsic
def store16(_typing, target, _index, x, _x_index):
    def codegen(context, builder, _signature, args):
        T = target.dtype
        address = _address(context, builder, target, args[0], args[1])
        first = _address(context, builder, x, args[2], args[3])
        elements = []
        for i in range(vec_length(T)):
            element = builder.load(builder.gep(first, [_WORD(i)]))
            elements.append(_convert(context, builder, element, x.dtype, T))
        if T.bitwidth == 16:
            words = [builder.zext(element, _WORD) for element in elements]
            elements = [
                builder.or_(low, builder.shl(high, _WORD(16)))
                for low, high in zip(words[::2], words[1::2], strict=True)
            ]
        vec = ir.Constant(ir.VectorType(elements[0].type, len(elements)), ir.Undefined)
        for i, element in enumerate(elements):
            vec = builder.insert_element(vec, element, _WORD(i))
        builder.store(builder.bitcast(vec, _WORDS), _as_words(builder, address), align=16)
        return context.get_dummy_value()

    return types.void(target, types.int64, x, types.int64), codegen


# The same sixteen bytes without a conversion.
@intrinsic
def copy16(_typing, target, _index, source, _source_index):
    def codegen(context, builder, _signature, args):
        to = _address(context, builder, target, args[0], args[1])
        vec = _address(context, builder, source, args[2], args[3])
        vec = builder.load(_as_words(builder, vec), align=16)
        builder.store(vec, _as_words(builder, to), align=16)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), codegen


# Two neighbours by one access, as C++ does with a float2; their address must be a multiple of it.
@intrinsic
def store_x2(_typing, target, _index, first, _second):
    def codegen(context, builder, _signature, args):
        to = builder.gep(args[0], [args[1]])
        pair = ir.VectorType(to.type.pointee, 2)
        vec = ir.Constant(pair, ir.Undefined)
        for i, element in enumerate(args[2:]):
            vec = builder.insert_element(vec, element, _WORD(i))
        builder.store(vec, builder.bitcast(to, pair.as_pointer()), align=2 * first.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(target, types.int64, target.dtype, target.dtype), codegen
