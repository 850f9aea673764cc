"""Checkpoints of Google's vision_transformer: one .npz of Flax parameters, without a configuration.

Every size is a shape in the file, the number of heads included. The rest is what the library's code
does: the tanh approximation of the GELU, which is Flax's, and pictures of [-1, 1], resized to a
square.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from workbench.vit.checkpoint import Tensors
from workbench.vit.images import Preprocessing
from workbench.vit.model import ViTConfig
from workbench.vit.names import Convert, Description, Names, Shape, Table

_BLOCK = "Transformer/encoderblock_{i}/"
_ATTENTION = _BLOCK + "MultiHeadDotProductAttention_1/"
PATCHES = "embedding/kernel"
POSITIONS = "Transformer/posembed_input/pos_embedding"
QUERY = _ATTENTION + "query/kernel"

TABLE: Table = {
    "class_token": "cls",
    "positions": POSITIONS,
    "patch_embed": "embedding/{kernel}",
    "norm1": _BLOCK + "LayerNorm_0/{scale}",
    "qkv": {_ATTENTION + f"{name}/{{kernel}}": 1 for name in ("query", "key", "value")},
    "proj": _ATTENTION + "out/{kernel}",
    "norm2": _BLOCK + "LayerNorm_2/{scale}",
    "fc1": _BLOCK + "MlpBlock_3/Dense_0/{kernel}",
    "fc2": _BLOCK + "MlpBlock_3/Dense_1/{kernel}",
    "norm": "Transformer/encoder_norm/{scale}",
    "representation": "pre_logits/{kernel}",
    "head": "head/{kernel}",
}


def describe(tensors: Tensors) -> tuple[Description, Names]:
    """The configuration that the shapes in the file tell."""
    entries = tensors.entries

    def shape(name: str, axes: int) -> Shape:
        if name not in entries:
            raise ValueError(f"{tensors.path}: tensor {name!r} is missing")
        found = entries[name].shape
        if len(found) != axes or min(found) < 1:
            raise ValueError(
                f"{tensors.path}: tensor {name!r} has shape {found}; it takes {axes} axes"
            )
        return found

    patch_height, patch_width, channels, dim = shape(PATCHES, 4)
    _, positions, _ = shape(POSITIONS, 3)
    first = _BLOCK.format(i=0)
    heads = shape(QUERY.format(i=0), 3)[1]
    hidden = shape(f"{first}MlpBlock_3/Dense_0/kernel", 2)[1]
    blocks = re.compile(_BLOCK.format(i=r"(\d+)") + ".*")
    depth = 1 + max(int(match[1]) for name in entries if (match := blocks.fullmatch(name)))
    class_token = "cls" in entries
    side = math.isqrt(positions - class_token)
    if side * side != positions - class_token:
        raise ValueError(
            f"{tensors.path}: tensor {POSITIONS!r} has {positions} positions, which are no square"
        )
    config = ViTConfig(
        image_size=(side * patch_height, side * patch_width),
        patch_size=(patch_height, patch_width),
        channels=channels,
        dim=dim,
        depth=depth,
        heads=heads,
        mlp_hidden=hidden,
        num_classes=shape("head/kernel", 2)[1] if "head/kernel" in entries else 0,
        eps=1e-6,
        activation="gelu_tanh",
        class_token=class_token,
        pool="token" if class_token else "avg",
        representation=shape("pre_logits/kernel", 2)[1] if "pre_logits/kernel" in entries else 0,
        resize="linear-corners",
    )
    half = (0.5,) * channels
    preprocessing = Preprocessing(
        config.image_size, fit="exact", interpolation="bilinear", mean=half, std=half
    )
    names = Names(TABLE, stored=_stored(heads))
    return Description(config, preprocessing, int(class_token), ()), names


def _stored(heads: int) -> Callable[[str, str, Shape], tuple[Shape, Convert]]:
    """How Flax stores a layer: (inputs, outputs), and heads along an axis of their own."""

    def stored(layer: str, part: str, shape: Shape) -> tuple[Shape, Convert]:
        if layer == "patch_embed" and part == "weight":
            outputs, channels, height, width = shape
            return (height, width, channels, outputs), lambda x: x.transpose(3, 2, 0, 1)
        if layer == "qkv":
            split = (heads, shape[0] // heads)
            if part == "weight":
                return (shape[1], *split), lambda x: x.reshape(len(x), -1).T
            return split, lambda x: x.reshape(-1)
        if layer == "proj" and part == "weight":
            outputs, inputs = shape
            return (heads, inputs // heads, outputs), lambda x: x.reshape(-1, x.shape[-1]).T
        return shape[::-1], lambda x: x.T

    return stored
