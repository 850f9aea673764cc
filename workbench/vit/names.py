"""From the tensors of a checkpoint, under its library's names, to the weights of the model.

A library's names are a table: what we call a layer, and what the library calls it. In a name,
``{i}`` is the number of the block and ``{p}`` the part of the layer, weight or bias (``{kernel}``
and ``{scale}`` likewise, where Flax calls the weight so). Where a layer of ours is several of
theirs, one above the other, the table has a mapping of names to their share of the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from workbench.vit.checkpoint import Tensors
from workbench.vit.images import Preprocessing
from workbench.vit.model import ViTConfig, list_faults, weight_shapes

Shape = tuple[int, ...]
Table = dict[str, str | Mapping[str, int]]
Convert = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]

# The learned tokens and positions of a file, which `weight_shapes` has as prefix and positions.
TOKENS = ("class_token", "distillation_token", "registers")
OUR_NAME = re.compile(r"(?:blocks\.(\d+)\.)?(.+?)(?:\.(weight|bias))?")


def as_they_are(_layer: str, _part: str, shape: Shape) -> tuple[Shape, Convert]:
    """Weights that a file holds as the model does."""
    return shape, lambda x: x


@dataclass(frozen=True, slots=True)
class Names:
    """How a library names its tensors.

    Attributes
    ----------
    table : mapping of str to str or mapping
        The library's name of every layer of `weight_shapes`, and of class_token,
        distillation_token, registers and positions.
    ignored : tuple of str
        Patterns of the names that may lie beside: of a text tower, say.
    unprefixed : tuple of str
        Layers of ours whose names never have the prefix that the others may have.
    leading : mapping of str to int
        Axes of length 1 before those of the learned tokens and positions, where it is not the
        usual number.
    stored : callable
        (layer, part, our shape) -> (shape in the file, function from it to ours).
    """

    table: Table
    ignored: tuple[str, ...] = ()
    unprefixed: tuple[str, ...] = ("head", "head_dist")
    leading: Mapping[str, int] = field(default_factory=dict)
    stored: Callable[[str, str, Shape], tuple[Shape, Convert]] = as_they_are


class Description(NamedTuple):
    """What a configuration says about its model.

    ``positioned`` are the tokens before the patches that have a position of their own, the first
    ones.
    """

    config: ViTConfig
    preprocessing: Preprocessing
    positioned: int
    labels: tuple[str, ...]


class _Piece(NamedTuple):
    """A tensor of the file."""

    name: str
    shape: Shape
    convert: Convert


def assemble(
    tensors: Tensors, config: ViTConfig, names: Names, positioned: int
) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of a model, after every name, shape and dtype in the file is found right.

    Parameters
    ----------
    tensors : Tensors
        The checkpoint.
    config : ViTConfig
        What it should hold.
    names : Names
        Under which names; what stands before them all, "vit." say, is found in the file.
    positioned : int
        How many of the tokens before the patches have a position of their own, the first ones.

    Returns
    -------
    dict of str to numpy.ndarray
        The tensors of `weight_shapes`; halves are widened to float32.

    Raises
    ------
    ValueError
        A tensor is missing, of a wrong shape or dtype, or has no place in this model.
    """
    prefix = _find_prefix(tensors, names)
    plan = {
        name: _pieces(names, name, shape, prefix)
        for name, shape in weight_shapes(config).items()
        if name not in ("prefix", "positions")
    }
    tokens = _token_pieces(names, config, prefix, positioned)
    _check(tensors, [p for pieces in (*plan.values(), tokens.values()) for p in pieces], names)
    read = tensors.read({p.name for pieces in (*plan.values(), tokens.values()) for p in pieces})

    def take(piece: _Piece) -> np.ndarray[Any, Any]:
        x = piece.convert(read[piece.name])
        return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)

    weights = {}
    for name, pieces in plan.items():
        parts = [take(piece) for piece in pieces]
        weights[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    positions = take(tokens.pop("positions"))
    if tokens:
        before = np.concatenate([take(piece) for piece in tokens.values()])
        before[:positioned] += positions[:positioned]
        weights["prefix"] = before
    weights["positions"] = positions[positioned:].reshape(*config.grid, config.dim)
    return weights


def _find_prefix(tensors: Tensors, names: Names) -> str:
    """What stands before the names in a file, as before that of the patches' projection."""
    patches = names.table["patch_embed"]
    assert isinstance(patches, str)
    last = patches.format(p="weight", kernel="kernel")
    found = [name.removesuffix(last) for name in tensors.entries if name.endswith(last)]
    prefixes = [prefix for prefix in found if not prefix or prefix.endswith(".")]
    return min(prefixes, key=len, default="")


def _pieces(names: Names, ours: str, shape: Shape, prefix: str) -> list[_Piece]:
    match = OUR_NAME.fullmatch(ours)
    assert match is not None
    block, layer, part = match.groups(default="")
    theirs = names.table[layer]
    if isinstance(theirs, str):
        theirs = {theirs: 1}
    if layer in names.unprefixed:
        prefix = ""
    whole = sum(theirs.values())
    pieces = []
    for name, share in theirs.items():
        rows = shape[0] * share // whole
        in_file, convert = names.stored(layer, part, (rows, *shape[1:]))
        if layer == "pool.probe":  # one of one batch, to every library
            in_file, convert = (1, 1, *in_file), np.ravel
        flax = {key: key if part == "weight" else part for key in ("kernel", "scale")}
        pieces.append(_Piece(prefix + name.format(i=block, p=part, **flax), in_file, convert))
    return pieces


def _token_pieces(
    names: Names, config: ViTConfig, prefix: str, positioned: int
) -> dict[str, _Piece]:
    """The learned tokens in their order, and the positions, each as (number, dim)."""
    rows, cols = config.grid
    counts = {
        "class_token": int(config.class_token),
        "distillation_token": int(config.distillation_token),
        "registers": config.registers,
        "positions": positioned + rows * cols,
    }
    pieces = {}
    for name, count in counts.items():
        if count:
            single = name in ("class_token", "distillation_token")
            leading = names.leading.get(name, 1)
            own = (config.dim,) if single and not leading else (count, config.dim)
            theirs = names.table[name]
            assert isinstance(theirs, str)
            shape = (1,) * leading + own
            pieces[name] = _Piece(prefix + theirs, shape, lambda x: x.reshape(-1, x.shape[-1]))
    return pieces


def _check(tensors: Tensors, pieces: list[_Piece], names: Names) -> None:
    entries = tensors.entries
    wanted = {piece.name for piece in pieces}

    def where(name: str) -> str:
        file = entries[name].file
        return f"tensor {name!r}" + (f" of {file.name}" if file != tensors.path else "")

    faults = [f"tensor {name!r} is missing" for name, _, _ in pieces if name not in entries]
    for name, shape, _ in pieces:
        if name in entries and entries[name].shape != shape:
            faults.append(
                f"{where(name)} has shape {entries[name].shape}, the configuration asks for {shape}"
            )
        elif name in entries and not entries[name].floating:
            faults.append(f"{where(name)} does not hold floats")
    faults += [
        f"{where(name)} has no place in this model"
        for name in entries
        if name not in wanted and not any(re.fullmatch(p, name) for p in names.ignored)
    ]
    if faults:
        raise ValueError(f"{tensors.path}: {list_faults(faults)}")
