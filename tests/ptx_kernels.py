"""Small kernels written in PTX by hand, for the tests of the simulator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.simulator import engine
from workbench.simulator.checks import Checker
from workbench.simulator.decode import decode
from workbench.simulator.memory import Buffer, GlobalMemory
from workbench.simulator.ptx import parse

HEADER = """
.version 9.0
.target sm_80
.address_size 64
"""
REGISTERS = """
    .reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<128>; .reg .f32 %f<64>;
    .reg .b64 %d<64>; .reg .f64 %e<64>;
"""
# Registers by the width of what they hold, and of addresses of arrays and of a thread's elements.
WIDTHS = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}


def kernel(body: str, names: tuple[str, ...] = (), module: str = "") -> str:
    """A module with one kernel, whose parameters are pointers; %d0, %d1, ... hold them."""
    parameters = ", ".join(f".param .u64 {name}" for name in names)
    loads = "\n".join(f"ld.param.u64 %d{i}, [{name}];" for i, name in enumerate(names))
    return f"{HEADER}{module}\n.visible .entry k({parameters})\n{{{REGISTERS}{loads}\n{body}\n}}\n"


def run_text(
    text: str,
    arrays: Mapping[str, np.ndarray],
    *,
    outputs: tuple[str, ...] = ("out",),
    grid: int | tuple[int, ...] = 1,
    block: int | tuple[int, ...] = 32,
    shared: int = 0,
    checks: bool = True,
    words: tuple[int, ...] = (),
    unwritten: tuple[str, ...] = (),
    **options: Any,
) -> engine.Launch:
    """Run the kernel ``k`` of a module; the outputs are filled in place.

    `words` are parameters after the pointers; `unwritten` are outputs without initial values.
    """
    memory = GlobalMemory(
        {name: Buffer(x, name in outputs, name not in unwritten) for name, x in arrays.items()}
    )
    pointers = [memory.addresses[name] for name in arrays]
    params = np.array([*pointers, *words], np.uint64).tobytes()
    checker = Checker(memory) if checks else None
    code = decode(parse(text, "k"))
    shapes = [x if isinstance(x, tuple) else (x,) for x in (grid, block)]
    launch = engine.Launch(code, *shapes, shared, params, memory, checker, **options)
    engine.run(launch)
    memory.copy_back()
    return launch


def run_with(
    text: str,
    name: str,
    arrays: Mapping[str, np.ndarray],
    parameters: Callable[[Mapping[str, int]], Sequence[bytes | int]],
    *,
    outputs: tuple[str, ...] = ("out",),
    grid: int = 1,
    block: int = 128,
    shared: int = 0,
    checks: bool = True,
    **options: Any,
) -> engine.Launch:
    """Run a kernel whose parameters are made from the addresses of the arrays.

    An int is a parameter of 32 bits; bytes are one that is aligned to its size, up to 64.
    """
    memory = GlobalMemory(
        {key: Buffer(x, key in outputs, key not in outputs) for key, x in arrays.items()}
    )
    data = b""
    for x in parameters(memory.addresses):
        one = x if isinstance(x, bytes) else int(x).to_bytes(4, "little")
        data = data.ljust(-(-len(data) // min(len(one), 64)) * min(len(one), 64), b"\0") + one
    checker = Checker(memory) if checks else None
    code = decode(parse(text, name))
    launch = engine.Launch(code, (grid,), (block,), shared, data, memory, checker, **options)
    engine.run(launch)
    memory.copy_back()
    return launch


def compile_cuda(source: str, **defines: int) -> str:
    """PTX for sm_90a of a source that includes nothing; needs NVRTC."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"source.cu", 0, [], [])
    options = [b"--gpu-architecture=compute_90a", b"-lineinfo"]
    options += [f"-D{name}={value}".encode() for name, value in defines.items()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    get, size = (
        (nvrtc.nvrtcGetPTX, nvrtc.nvrtcGetPTXSize)
        if result == nvrtc.nvrtcResult.NVRTC_SUCCESS
        else (nvrtc.nvrtcGetProgramLog, nvrtc.nvrtcGetProgramLogSize)
    )
    text = b" " * (size(program)[1] + 1)
    get(program, text)
    decoded = text.decode().rstrip("\0 ")
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, decoded
    return decoded


def run_body(body: str, arrays: Mapping[str, np.ndarray], **options: Any) -> engine.Launch:
    """The same with a kernel's body alone; ``%r0`` is the thread's number in the grid."""
    start = (
        "mov.u32 %r120, %ctaid.x; mov.u32 %r121, %ntid.x; mov.u32 %r122, %tid.x;"
        "mad.lo.u32 %r0, %r120, %r121, %r122;\n"
    )
    return run_text(kernel(start + body, tuple(arrays)), arrays, **options)


def apply(
    opcode: str,
    operands: tuple[Any, ...],
    result: Any,
    *,
    shown: tuple[int, ...] | None = None,
) -> np.ndarray:
    """What one instruction makes of arrays, an element a thread; an int stands for a literal.

    An operand of dtype bool becomes a predicate, and so does a result. `shown` are the operands
    that the instruction names, if not all.
    """
    size = max(x.size for x in operands if isinstance(x, np.ndarray))
    result = np.dtype(result)
    arrays = {f"a{i}": x for i, x in enumerate(operands) if isinstance(x, np.ndarray)}
    out = np.zeros(size, np.uint8 if result.kind == "b" else result)
    arrays["out"] = out
    lines, names = [], []
    for i, x in enumerate(operands):
        if not isinstance(x, np.ndarray):
            names.append(str(x))
            continue
        pointer, width = list(arrays).index(f"a{i}"), x.dtype.itemsize
        register = f"{WIDTHS[width]}{20 + i}"
        lines.append(f"mad.wide.u32 %d{40 + i}, %r0, {width}, %d{pointer};")
        lines.append(f"ld.global.b{8 * width} {register}, [%d{40 + i}];")
        if x.dtype == bool:
            lines.append(f"setp.ne.u16 %p{20 + i}, {register}, 0;")
            register = f"%p{20 + i}"
        names.append(register)
    width = result.itemsize
    target = "%p1" if result.kind == "b" else f"{WIDTHS[width]}61"
    named = names if shown is None else [names[i] for i in shown]
    lines.append(f"{opcode} {', '.join([target, *named])};")
    if result.kind == "b":
        lines.append("selp.u16 %h61, 1, 0, %p1;")
    lines.append(f"mad.wide.u32 %d39, %r0, {width}, %d{list(arrays).index('out')};")
    lines.append(f"st.global.b{8 * width} [%d39], {WIDTHS[width]}61;\nret;")
    run_body("\n".join(lines), arrays, block=size)
    return out.astype(bool) if result.kind == "b" else out
