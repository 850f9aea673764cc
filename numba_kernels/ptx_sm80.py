"""One function per instruction, named after it. Twin: cuda_src/ptx_sm80.cuh.

Asynchronous copies, new in sm_80, and the ordered loads and stores that blocks use to wait for each
other (sm_70).
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

_WORD = ir.IntType(32)
_SHARED = 3  # NVVM's number of the address space


def _assembly(builder, result, text, constraints, args):
    """One instruction that the compiler may neither drop nor move over accesses to memory."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    code = ir.InlineAsm(kind, text, f"{constraints},~{{memory}}", side_effect=True)
    return builder.call(code, args)


def shared_address(context, builder, array_type, array, index):
    """The 32-bit address of array[index], an array in shared memory."""
    pointer = context.make_array(array_type)(context, builder, array).data
    pointer = builder.gep(pointer, [index])
    pointer = builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(_SHARED))
    return builder.ptrtoint(pointer, _WORD)


# Copies BYTES (4, 8 or 16) from source[source_index] to shared[index] without passing through
# registers; both addresses must be multiples of BYTES. Where exists is false nothing is read and
# zeros are written. The copy is done for the thread that started it after cp_async_wait_all, for
# others only after a barrier that follows.
def cp_async(BYTES):
    level = "cg" if BYTES == 16 else "ca"  # 16 bytes go past L1: nobody else here wants them

    @intrinsic
    def function(_typing, shared, index, source, source_index, exists):
        def codegen(context, builder, signature, args):
            to = shared_address(context, builder, signature.args[0], args[0], args[1])
            source = builder.gep(args[2], [args[3]])
            size = builder.select(args[4], _WORD(BYTES), _WORD(0))
            text = f"cp.async.{level}.shared.global [$0], [$1], {BYTES}, $2;"
            _assembly(builder, ir.VoidType(), text, "r,l,r", [to, source, size])
            return context.get_dummy_value()

        return types.void(shared, types.int64, source, types.int64, types.boolean), codegen

    return function


@intrinsic
def cp_async_wait_all(_typing):
    def codegen(context, builder, _signature, _args):
        kind = ir.FunctionType(ir.VoidType(), [])
        text = "cp.async.wait_all;"
        builder.call(ir.InlineAsm(kind, text, "~{memory}", side_effect=True), [])
        return context.get_dummy_value()

    return types.void(), codegen


# What another block wrote before its st_release is seen after an ld_acquire that reads its value.
@intrinsic
def ld_acquire(_typing, pointer):
    def codegen(_context, builder, _signature, args):
        return _assembly(builder, _WORD, "ld.acquire.gpu.s32 $0, [$1];", "=r,l", args)

    return types.int32(pointer), codegen


@intrinsic
def st_release(_typing, pointer, value):
    def codegen(context, builder, _signature, args):
        _assembly(builder, ir.VoidType(), "st.release.gpu.s32 [$0], $1;", "l,r", args)
        return context.get_dummy_value()

    return types.void(pointer, types.int32), codegen


# Adds one and returns what was there.
@intrinsic
def atom_inc(_typing, pointer):
    def codegen(_context, builder, _signature, args):
        return _assembly(builder, _WORD, "atom.global.add.s32 $0, [$1], 1;", "=r,l", args)

    return types.int32(pointer), codegen
