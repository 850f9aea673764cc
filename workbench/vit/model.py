"""The vision transformer, as one forward pass in NumPy that CuPy runs too.

An image becomes a row of tokens: one a patch, with a class token in front. Every block lets the
tokens look at each other (``workbench.attention``) and then transforms each by itself (the MLP).
The equation numbers in the comments are those of the paper.

References
----------
.. [1] A. Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at
   Scale", ICLR 2021, https://arxiv.org/abs/2010.11929
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from workbench.api import attention
from workbench.vit.images import Preprocessing

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray: whatever the images are


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Everything about a vision transformer that changes its answer, apart from the weights.

    The defaults are those of ViT-B/16 at 224 x 224.

    Parameters
    ----------
    image_size, patch_size : (int, int)
        Height and width in pixels. Every patch is one token.
    channels : int
        Colours of a pixel.
    dim, depth, heads : int
        Width of a token, number of blocks, attention heads of a block.
    mlp_hidden : int
        Width between the two layers of the MLP.
    num_classes : int
        Rows of the head; 0 leaves the head out.
    eps : float
        Added to the variance in every layer norm.
    qkv_bias : bool
        Whether the projection to q, k and v has a bias.
    class_token : bool
        Whether a learned token stands before the patches.
    pool : {"token", "avg"}
        The features are the class token after the final norm (``"token"``), or the final norm of
        the mean patch token (``"avg"``).
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    channels: int = 3
    dim: int = 768
    depth: int = 12
    heads: int = 12
    mlp_hidden: int = 3072
    num_classes: int = 1000
    eps: float = 1e-6
    qkv_bias: bool = True
    class_token: bool = True
    pool: str = "token"

    def __post_init__(self) -> None:
        sizes = {
            "image_size": min(self.image_size),
            "patch_size": min(self.patch_size),
            **{name: getattr(self, name) for name in ("channels", "dim", "heads", "mlp_hidden")},
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.depth < 0 or self.num_classes < 0:
            raise ValueError(
                "depth and num_classes must not be negative, "
                f"got {self.depth} and {self.num_classes}"
            )
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads")
        if any(n % p for n, p in zip(self.image_size, self.patch_size, strict=True)):
            raise ValueError(
                f"image_size {self.image_size} does not divide into patches of {self.patch_size}"
            )
        if self.pool not in ("token", "avg"):
            raise ValueError(f'pool must be "token" or "avg", got {self.pool!r}')
        if self.pool == "token" and not self.class_token:
            raise ValueError('pool="token" needs class_token=True')
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be finite and not negative, got {self.eps}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def prefix_tokens(self) -> int:
        """Tokens that stand before the patches."""
        return int(self.class_token)

    @property
    def tokens(self) -> int:
        """Tokens of one image."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]


def weight_shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a model of this configuration has.

    The names are timm's. A linear layer's weight is (outputs, inputs).
    """
    dim, hidden = config.dim, config.mlp_hidden
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (dim, config.channels, *config.patch_size),
        "patch_embed.proj.bias": (dim,),
        "pos_embed": (1, config.tokens, dim),
    }
    if config.class_token:
        shapes["cls_token"] = (1, 1, dim)
    for i in range(config.depth):
        block = f"blocks.{i}."
        for norm in ("norm1", "norm2"):
            shapes |= {f"{block}{norm}.weight": (dim,), f"{block}{norm}.bias": (dim,)}
        for layer, outputs, inputs in (
            ("attn.qkv", 3 * dim, dim),
            ("attn.proj", dim, dim),
            ("mlp.fc1", hidden, dim),
            ("mlp.fc2", dim, hidden),
        ):
            shapes[f"{block}{layer}.weight"] = (outputs, inputs)
            if layer != "attn.qkv" or config.qkv_bias:
                shapes[f"{block}{layer}.bias"] = (outputs,)
    norm = _final_norm(config)
    shapes |= {f"{norm}.weight": (dim,), f"{norm}.bias": (dim,)}
    if config.num_classes:
        shapes |= {"head.weight": (config.num_classes, dim), "head.bias": (config.num_classes,)}
    return shapes


def check_shapes(shapes: Mapping[str, Sequence[int]], config: ViTConfig, source: str) -> None:
    """Raise a ValueError that names every tensor missing, unknown or of a wrong shape.

    Parameters
    ----------
    shapes : mapping of str to sequence of int
        What there is.
    config : ViTConfig
        What there should be.
    source : str
        Where the tensors come from, for the message.
    """
    wanted = weight_shapes(config)
    faults = [f"tensor {name!r} is missing" for name in wanted if name not in shapes]
    faults += [
        f"tensor {name!r} has no place in this model" for name in shapes if name not in wanted
    ]
    faults += [
        f"tensor {name!r} has shape {tuple(shapes[name])}, the configuration asks for {shape}"
        for name, shape in wanted.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    if faults:
        shown = faults[:8] + ([f"and {len(faults) - 8} more"] if len(faults) > 8 else [])
        raise ValueError(f"{source}: " + "; ".join(shown))


class BlockAttention(NamedTuple):
    """What attention of one block saw: enough for any row of its map (`attention_map`).

    q and k are (batch, heads, tokens, head_dim), lse is (batch, heads, tokens).
    """

    q: Array
    k: Array
    lse: Array


@dataclass(frozen=True, slots=True)
class Result:
    """What a forward pass returns.

    Attributes
    ----------
    tokens : array (batch, tokens, dim)
        All tokens after the last block; with ``pool="token"`` also after the final norm.
    features : array (batch, dim)
        The pooled image.
    logits : array (batch, num_classes) or None
        The head's answer, where there is a head.
    embed : array (batch, tokens, dim) or None
        Tokens before the first block, with ``return_states=True``.
    blocks : tuple of array (batch, tokens, dim)
        Tokens after each block, with ``return_states=True``.
    attention : dict of int to BlockAttention
        q, k and lse of the blocks in ``return_attention``, by their number from 0.
    """

    tokens: Array
    features: Array
    logits: Array | None
    embed: Array | None = None
    blocks: tuple[Array, ...] = ()
    attention: dict[int, BlockAttention] = field(default_factory=dict)


class ViT:
    """A vision transformer (Dosovitskiy et al. 2021): ``model(images) -> Result``.

    Parameters
    ----------
    config : ViTConfig
        Sizes and options.
    weights : mapping of str to numpy.ndarray
        Exactly the tensors of `weight_shapes`; float16 and bfloat16 ones are widened to float32.
    preprocessing : Preprocessing, optional
        How `preprocess` makes this model's input from a picture.

    Raises
    ------
    ValueError
        A tensor is missing, unknown or of a wrong shape.
    """

    def __init__(
        self,
        config: ViTConfig,
        weights: Mapping[str, np.ndarray[Any, Any]],
        preprocessing: Preprocessing | None = None,
    ) -> None:
        check_shapes({name: w.shape for name, w in weights.items()}, config, "weights")
        self.config = config
        half = (0.5,) * config.channels
        self.preprocessing = preprocessing or Preprocessing(config.image_size, mean=half, std=half)
        self._weights = {
            name: w if w.dtype == np.float64 else w.astype(np.float32, copy=False)
            for name, w in weights.items()
        }
        # Copies in another dtype or on a GPU, made by the first call that needs them.
        self._copies: dict[tuple[object, ...], dict[str, Array]] = {}

    def __call__(
        self,
        images: Array,
        *,
        return_states: bool = False,
        return_attention: Sequence[int] = (),
        backend: str = "auto",
        kernel: str | None = None,
    ) -> Result:
        """Run the model.

        Parameters
        ----------
        images : array (batch, channels, height, width)
            Preprocessed pictures, NumPy or CuPy. float64 is computed in float64, any other floating
            dtype in float32.
        return_states : bool
            Keep the tokens before and after every block.
        return_attention : sequence of int
            Blocks whose q, k and lse to keep; -1 is the last.
        backend, kernel : str, optional
            Passed on to `workbench.attention`.

        Returns
        -------
        Result
            Arrays of the images' own kind.
        """
        config = self.config
        images = self._ready(images)
        kept = {range(config.depth)[i] for i in return_attention}
        with _device(images):
            w = self._weights_beside(images)
            x = embed = self._embed(w, images)
            states: list[Array] = []
            seen: dict[int, BlockAttention] = {}
            for i in range(config.depth):
                block = f"blocks.{i}."
                # z' = MSA(LN(z)) + z                                                          (2)
                mixed, block_attention = self._self_attention(
                    w, block, self._norm(w, block + "norm1", x), backend, kernel, i in kept
                )
                x = x + mixed
                # z = MLP(LN(z')) + z'                                                         (3)
                x = x + self._mlp(w, block, self._norm(w, block + "norm2", x))
                if block_attention is not None:
                    seen[i] = block_attention
                if return_states:
                    states.append(x)
            # y = LN(z of the class token)                                                     (4)
            if config.pool == "token":
                x = self._norm(w, _final_norm(config), x)
                features = x[:, 0]
            else:
                features = x[:, config.prefix_tokens :].mean(axis=1)
                features = self._norm(w, _final_norm(config), features)
            logits = _linear(w, "head", features) if config.num_classes else None
        return Result(x, features, logits, embed if return_states else None, tuple(states), seen)

    def _ready(self, images: Array) -> Array:
        """The images in the dtype of the computation, or the reason why not."""
        array_module(images)
        config = self.config
        wanted = (config.channels, *config.image_size)
        if images.ndim != 4 or images.shape[1:] != wanted:
            raise ValueError(
                "images must be (batch, channels, height, width) = "
                f"(batch, {', '.join(map(str, wanted))}), got {images.shape}"
            )
        if images.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
            raise TypeError(
                "images must be preprocessed floats (float16, bfloat16, float32 or float64), "
                f"got {images.dtype}"
            )
        return images if images.dtype == np.float64 else images.astype(np.float32, copy=False)

    def _weights_beside(self, images: Array) -> dict[str, Array]:
        """The weights as arrays of the images' module, device and dtype, kept for the next call."""
        xp = array_module(images)
        key = (xp.__name__, None if xp is np else images.device.id, images.dtype)
        if key not in self._copies:
            self._copies[key] = {
                name: xp.asarray(w, dtype=images.dtype) for name, w in self._weights.items()
            }
        return self._copies[key]

    def _embed(self, w: dict[str, Array], images: Array) -> Array:
        """Equation (1), [class token; patches E] + positions: (batch, tokens, dim)."""
        xp = array_module(images)
        config = self.config
        patches = split_patches(images, config.patch_size)
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        projection = w["patch_embed.proj.weight"].reshape(config.dim, -1)
        x = _product(patches, projection) + w["patch_embed.proj.bias"]
        if config.class_token:
            first = xp.broadcast_to(w["cls_token"], (len(x), 1, config.dim))
            x = xp.concatenate([first, x], axis=1)
        x += w["pos_embed"]
        return x

    def _self_attention(
        self,
        w: dict[str, Array],
        block: str,
        x: Array,
        backend: str,
        kernel: str | None,
        keep: bool,
    ) -> tuple[Array, BlockAttention | None]:
        """Every token gathers from all tokens: (batch, tokens, dim) to the same shape."""
        batch, tokens, dim = x.shape
        heads = self.config.heads
        qkv = _linear(w, block + "attn.qkv", x).reshape(batch, tokens, 3, heads, dim // heads)
        # Three views of the packed array, which attention reads in place.
        q, k, v = (qkv[:, :, part] for part in range(3))
        if keep:
            out, lse = attention(
                q, k, v, layout="bnhd", return_lse=True, backend=backend, kernel=kernel
            )
            seen = BlockAttention(q.swapaxes(1, 2), k.swapaxes(1, 2), lse)
        else:
            out, seen = attention(q, k, v, layout="bnhd", backend=backend, kernel=kernel), None
        return _linear(w, block + "attn.proj", out.reshape(batch, tokens, dim)), seen

    def _mlp(self, w: dict[str, Array], block: str, x: Array) -> Array:
        """Every token by itself: widened, bent, narrowed again."""
        return _linear(w, block + "mlp.fc2", gelu(_linear(w, block + "mlp.fc1", x)))

    def _norm(self, w: dict[str, Array], name: str, x: Array) -> Array:
        return layer_norm(x, w[name + ".weight"], w[name + ".bias"], self.config.eps)


def split_patches(images: Array, patch_size: tuple[int, int]) -> Array:
    """Cut images into flattened patches, row by row.

    Parameters
    ----------
    images : array (batch, channels, height, width)
        Height and width divide into patches.
    patch_size : (int, int)
        Height and width of a patch.

    Returns
    -------
    array (batch, patches, channels * patch_height * patch_width)
        The pixels of a patch in the order of a convolution's weight: channel, row, column.
    """
    batch, channels, height, width = images.shape
    patch_height, patch_width = patch_size
    rows, cols = height // patch_height, width // patch_width
    grid = images.reshape(batch, channels, rows, patch_height, cols, patch_width)
    patches = grid.transpose(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * cols, channels * patch_height * patch_width)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Shift and scale every token to mean 0 and variance 1, then to its learned range.

    Parameters
    ----------
    x : array (..., dim)
        Tokens.
    weight, bias : array (dim,)
        The learned range.
    eps : float
        Added to the variance.

    Returns
    -------
    array (..., dim)
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    centred /= (variance + eps) ** 0.5
    centred *= weight
    centred += bias
    return centred


def gelu(x: Array) -> Array:
    """The exact GELU, x (1 + erf(x / sqrt 2)) / 2, not its tanh approximation.

    It is x times the probability that a normal variable is smaller. There is no temporary but the
    result, in the dtype of `x`.
    """
    y = x * x.dtype.type(math.sqrt(0.5))
    _erf(x)(y, out=y)
    y += 1
    y *= x
    y *= 0.5
    return y


def array_module(array: Array) -> ModuleType:
    """NumPy or CuPy, whichever the array belongs to. CuPy is never imported for it.

    Raises
    ------
    TypeError
        It is neither.
    """
    if isinstance(array, np.ndarray):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy
    raise TypeError(f"expected a NumPy or CuPy array, got {type(array).__name__}")


def _linear(w: dict[str, Array], name: str, x: Array) -> Array:
    """X W^T + b, with b where the layer has one."""
    y = _product(x, w[name + ".weight"])
    bias = w.get(name + ".bias")
    if bias is not None:
        y += bias
    return y


def _product(x: Array, weight: Array) -> Array:
    """X W^T over the last axis: all tokens of all images in one matrix product."""
    y = x.reshape(-1, x.shape[-1]) @ weight.T
    return y.reshape(*x.shape[:-1], len(weight))


def _erf(x: Array) -> Any:
    # Imported by name when it is needed: cupyx exists beside CuPy only.
    module = "scipy.special" if array_module(x) is np else "cupyx.scipy.special"
    return import_module(module).erf


def _final_norm(config: ViTConfig) -> str:
    return "norm" if config.pool == "token" else "fc_norm"


def _device(array: Array) -> AbstractContextManager[Any]:
    """Makes the array's GPU the current one; for NumPy, nothing."""
    return nullcontext() if array_module(array) is np else array.device
