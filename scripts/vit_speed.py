"""Time a vision transformer beside its own matrix products, on the CPU or on a GPU.

    python scripts/vit_speed.py
    python scripts/vit_speed.py --gpu --dtype bfloat16 --batch 64

The weights are random. The products alone are the same ones, through the same BLAS, with nothing
between them; attention alone is one call a block, on arrays laid out as the model lays them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from workbench import attention, bench, vit
from workbench.problem import DTYPES
from workbench.vit import layers
from workbench.vit.model import weight_shapes


def products(config: vit.ViTConfig, batch: int, array: Any) -> Callable[[], None]:
    """All matrix products of a forward pass but those of attention."""
    rows, cols = config.grid
    patches = batch * rows * cols
    tokens = patches + batch * config.prefix_tokens
    pairs = []
    for name, shape in weight_shapes(config).items():
        if name.endswith(".weight") and len(shape) > 1:
            count = patches if name.startswith("patch") else tokens
            if name.startswith("head"):
                count = batch
            weight = array(shape[0], int(np.prod(shape[1:])))
            pairs.append((array(count, weight.shape[1]), weight))

    def run() -> None:
        for x, weight in pairs:
            layers.product(x, weight)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_base_patch16_224", help="an architecture of timm")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--gpu", action="store_true", help="on CuPy arrays")
    parser.add_argument("--rounds", type=int, default=5, help="of measuring; the best one counts")
    parser.add_argument("--backend", default="auto", help="of attention")
    arguments = parser.parse_args()
    model, batch = vit.random_model(arguments.model), arguments.batch
    config, dtype = model.config, DTYPES[arguments.dtype]
    rng = np.random.default_rng(0)
    backend = arguments.backend
    if arguments.gpu:
        import cupy

        place, time, where = cupy.asarray, bench.time_gpu, bench.gpu_name()
    else:
        place, time, where = np.asarray, bench.time_host, bench.cpu_name()
        backend = "cpu" if backend == "auto" else backend

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return place(rng.standard_normal(shape, dtype=np.float32).astype(dtype))

    def weight(*shape: int) -> Any:
        return array(*shape, dtype=dtype if arguments.gpu else layers.wide(dtype))

    images = array(batch, config.channels, *config.image_size)
    rows, cols = config.grid
    tokens = rows * cols + config.prefix_tokens
    qkv = array(batch, tokens, 3, config.heads, config.dim // config.heads)

    def attend() -> None:
        for _ in range(config.depth):
            q, k, v = (qkv[:, :, part] for part in range(3))
            attention(q, k, v, layout="bnhd", return_lse=True, backend=backend)

    calls = (lambda: model(images, backend=backend), products(config, batch, weight), attend)
    rounds = [[time(call).minimum for call in calls] for _ in range(arguments.rounds)]
    whole, alone, attending = np.min(rounds, axis=0)
    print(f"{arguments.model}, batch {batch}, {arguments.dtype}, {where}")
    print(f"forward pass      {1e3 * whole:8.2f} ms  {batch / whole:8.1f} images/s")
    print(f"products alone    {1e3 * alone:8.2f} ms  {whole / alone:8.2f} times that")
    print(f"attention alone   {1e3 * attending:8.2f} ms  {attending / whole:8.1%} of the pass")


if __name__ == "__main__":
    main()
