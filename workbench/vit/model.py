"""The vision transformer, as one forward pass in NumPy that CuPy runs too.

An image becomes a row of tokens: one a patch, with a class token in front. Every block lets the
tokens look at each other (``workbench.attention``) and then transforms each by itself (the MLP).
The equation numbers in the comments are those of the paper [1]_. What later models added is an
option of `ViTConfig`: registers [2]_, layer scale [3]_, a gated MLP [4]_, normalised queries and
keys [5]_, pooling by attention [6]_.

References
----------
.. [1] A. Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at
   Scale", ICLR 2021, https://arxiv.org/abs/2010.11929
.. [2] T. Darcet et al., "Vision Transformers Need Registers", ICLR 2024
.. [3] H. Touvron et al., "Going deeper with Image Transformers", ICCV 2021
.. [4] N. Shazeer, "GLU Variants Improve Transformer", 2020
.. [5] M. Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", ICML 2023
.. [6] X. Zhai et al., "Scaling Vision Transformers", CVPR 2022
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from workbench.api import attention
from workbench.arrays import array_module, as_array, device_of
from workbench.problem import DTYPES, Array
from workbench.vit import layers
from workbench.vit.images import Preprocessing
from workbench.vit.layers import ACTIVATIONS
from workbench.vit.positions import METHODS, resize_positions

NORMS = ("tokens", "pooled", "none")
POOLS = ("token", "avg", "map", "token+avg", "token+distillation")
MOST_BLOCKS = 1000  # a configuration that asks for more is damaged
MLP_ACTIVATIONS = (*ACTIVATIONS, "swiglu")


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Everything about a vision transformer that changes its answer, apart from the weights.

    The defaults are those of ViT-B/16 at 224 x 224.

    Parameters
    ----------
    image_size, patch_size : (int, int)
        Height and width in pixels. Every patch is one token; what is left over at the right and at
        the bottom is not seen.
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
    activation : str
        Of the MLP: ``"gelu"``, its approximations ``"gelu_tanh"`` and ``"quick_gelu"``, ``"silu"``,
        or ``"swiglu"``: twice as wide a first layer, of which one half gates the other.
    qkv_bias, patch_bias, head_bias : bool
        Whether the projection to q, k and v, that of the patches and the head have a bias.
    qk_norm : bool
        Whether every head's q and k are normalised.
    layer_scale : bool
        Whether a learned factor stands before every residual.
    pre_norm : bool
        Whether the tokens are normalised before the first block.
    norm : {"tokens", "pooled", "none"}
        What the last norm is for: all tokens before they are pooled, the pooled ones, or nothing.
    class_token, distillation_token : bool
        Whether such a learned token stands before the patches, in this order.
    registers : int
        Learned tokens without a meaning of their own, behind those two.
    pool : {"token", "avg", "map", "token+avg", "token+distillation"}
        What the features are: the class token; the mean of the patches; what a learned query, the
        probe, gathers from the patches by attention and an MLP; the first two side by side; or the
        mean of class and distillation token, each with a head of its own.
    pool_prefix : bool
        Whether ``"avg"`` and ``"map"`` look at the tokens before the patches too.
    representation : int
        Width of a layer with a tanh between pooling and head; 0 leaves it out.
    resize : {"bicubic", "bicubic-antialias", "linear-corners"}
        How the position embeddings are resized for images of another size.
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
    activation: str = "gelu"
    qkv_bias: bool = True
    patch_bias: bool = True
    head_bias: bool = True
    qk_norm: bool = False
    layer_scale: bool = False
    pre_norm: bool = False
    norm: str = "tokens"
    class_token: bool = True
    distillation_token: bool = False
    registers: int = 0
    pool: str = "token"
    pool_prefix: bool = False
    representation: int = 0
    resize: str = "bicubic"

    def __post_init__(self) -> None:
        sizes = {
            "image_size": min(self.image_size),
            "patch_size": min(self.patch_size),
            **{name: getattr(self, name) for name in ("channels", "dim", "heads", "mlp_hidden")},
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("depth", "num_classes", "registers", "representation"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.depth > MOST_BLOCKS:
            raise ValueError(f"depth must be at most {MOST_BLOCKS}, got {self.depth}")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} does not divide into {self.heads} heads")
        if min(self.grid) < 1:
            raise ValueError(
                f"image_size {self.image_size} is less than one patch of {self.patch_size}"
            )
        for name, choices in (
            ("activation", MLP_ACTIVATIONS),
            ("norm", NORMS),
            ("pool", POOLS),
            ("resize", tuple(METHODS)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if self.pool.startswith("token") and not self.class_token:
            raise ValueError(f'pool="{self.pool}" needs class_token=True')
        if self.pool == "token+distillation" and not self.distillation_token:
            raise ValueError('pool="token+distillation" needs distillation_token=True')
        if self.pool == "token+distillation" and self.representation:
            raise ValueError('pool="token+distillation" goes without a representation')
        if self.norm == "pooled" and self.pool == "token+avg":
            raise ValueError('norm="pooled" does not go with pool="token+avg"')
        if self.pool == "map" and self.activation == "swiglu":
            raise ValueError('pool="map" does not go with activation="swiglu"')
        if not (math.isfinite(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be finite and not negative, got {self.eps}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.grid_of(self.image_size)

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image of this height and width."""
        (height, width), (patch_height, patch_width) = image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def prefix_tokens(self) -> int:
        """Tokens that stand before the patches."""
        return self.class_token + self.distillation_token + self.registers

    @property
    def features(self) -> int:
        """Width of the pooled image."""
        return self.representation or self.dim * (2 if self.pool == "token+avg" else 1)


def weight_shapes(config: ViTConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that a model of this configuration has.

    A linear layer's weight is (outputs, inputs). ``prefix`` holds the tokens before the patches,
    those that have a position of their own with it added.
    """
    dim, hidden = config.dim, config.mlp_hidden
    wide_hidden = 2 * hidden if config.activation == "swiglu" else hidden
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, *inputs: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (outputs, *inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)

    def norm(name: str, size: int = dim) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (size,)

    linear("patch_embed", dim, config.channels, *config.patch_size, bias=config.patch_bias)
    if config.prefix_tokens:
        shapes["prefix"] = (config.prefix_tokens, dim)
    shapes["positions"] = (*config.grid, dim)
    if config.pre_norm:
        norm("pre_norm")
    for i in range(config.depth):
        block = f"blocks.{i}."
        norm(block + "norm1")
        linear(block + "qkv", 3 * dim, dim, bias=config.qkv_bias)
        if config.qk_norm:
            norm(block + "q_norm", dim // config.heads)
            norm(block + "k_norm", dim // config.heads)
        linear(block + "proj", dim, dim)
        norm(block + "norm2")
        linear(block + "fc1", wide_hidden, dim)
        linear(block + "fc2", dim, hidden)
        if config.layer_scale:
            shapes[block + "scale1"] = shapes[block + "scale2"] = (dim,)
    if config.norm == "tokens":
        norm("norm")
    if config.pool == "map":
        shapes["pool.probe"] = (dim,)
        linear("pool.qkv", 3 * dim, dim)
        linear("pool.proj", dim, dim)
        norm("pool.norm")
        linear("pool.fc1", hidden, dim)
        linear("pool.fc2", dim, hidden)
    if config.norm == "pooled":
        norm("pooled_norm")
    if config.representation:
        linear("representation", config.representation, config.dim)
    if config.num_classes:
        linear("head", config.num_classes, config.features, bias=config.head_bias)
        if config.pool == "token+distillation":
            linear("head_dist", config.num_classes, dim, bias=config.head_bias)
    return shapes


def list_faults(faults: Sequence[str]) -> str:
    """The first of many faults and how many more there are, for one message."""
    shown = list(faults[:8]) + ([f"and {len(faults) - 8} more"] if len(faults) > 8 else [])
    return "; ".join(shown)


class BlockAttention(NamedTuple):
    """What attention of one block saw: enough for any row of its map (`attention_weights`).

    q and k are (batch, heads, tokens, head_dim), lse is (batch, heads, tokens).
    """

    q: Array
    k: Array
    lse: Array


@dataclass(frozen=True, slots=True)
class Result:
    """What a forward pass returns: float64 for images of float64, else float32.

    Attributes
    ----------
    tokens : array (batch, tokens, dim)
        All tokens after the last block; with ``norm="tokens"`` also after the last norm.
    features : array (batch, features)
        The pooled image.
    logits : array (batch, num_classes) or None
        The head's answer, where there is a head.
    grid : (int, int)
        Rows and columns of patches.
    prefix_tokens : int
        Tokens that stand before the patches.
    has_class_token : bool
        Whether the first of them is a class token.
    depth : int
        Number of blocks.
    embed : array (batch, tokens, dim) or None
        Tokens before the first block, with ``return_states=True``.
    blocks : tuple of array (batch, tokens, dim)
        Tokens after each block, with ``return_states=True``.
    attention : dict of int to BlockAttention
        q, k and lse of the blocks in ``return_attention``, by their number from 0.
    pool_attention : BlockAttention or None
        Likewise of the probe, with ``pool="map"`` and any ``return_attention``.
    """

    tokens: Array
    features: Array
    logits: Array | None
    grid: tuple[int, int]
    prefix_tokens: int
    has_class_token: bool
    depth: int
    embed: Array | None = None
    blocks: tuple[Array, ...] = ()
    attention: dict[int, BlockAttention] = field(default_factory=dict)
    pool_attention: BlockAttention | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward pass: its weights beside the images, its dtype, and how attention is to run."""

    w: dict[str, Array]
    dtype: Any  # T: what products and attention take
    backend: str
    kernel: str | None


class ViT:
    """A vision transformer (Dosovitskiy et al. 2021): ``model(images) -> Result``.

    Parameters
    ----------
    config : ViTConfig
        Sizes and options.
    weights : mapping of str to numpy.ndarray
        Exactly the tensors of `weight_shapes`, of any floating dtype.
    preprocessing : Preprocessing, optional
        How `preprocess` makes this model's input from a picture.
    labels : sequence of str, optional
        What the classes are called.

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
        labels: Sequence[str] = (),
    ) -> None:
        wanted = weight_shapes(config)
        faults = [f"{name!r} is missing" for name in wanted if name not in weights]
        faults += [f"{name!r} has no place in this model" for name in weights if name not in wanted]
        faults += [
            f"{name!r} has shape {w.shape}, the configuration asks for {wanted[name]}"
            for name, w in weights.items()
            if name in wanted and w.shape != wanted[name]
        ]
        if faults:
            raise ValueError(f"weights: {list_faults(faults)}")
        if labels and len(labels) != config.num_classes:
            raise ValueError(f"labels are {len(labels)}, but num_classes is {config.num_classes}")
        self.config = config
        half = (0.5,) * config.channels
        self.preprocessing = preprocessing or Preprocessing(config.image_size, mean=half, std=half)
        self.labels = tuple(labels)
        self._weights = dict(weights)
        # Copies in the dtype of a computation or on a GPU, made by the first call that needs them.
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
            Preprocessed pictures, NumPy or CuPy, of the size in the configuration or of any other
            that divides into patches: the position embeddings are resized then. Their dtype,
            float16, bfloat16, float32 or float64, is that of the matrix products and of attention;
            what lies between them is computed in float32, or in float64 for float64.
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

        Raises
        ------
        TypeError, ValueError
            For images that the model does not take, and as `workbench.attention` does.
        IndexError
            For a block that the model does not have.
        """
        config = self.config
        images = as_array("images", images)
        self._check(images)
        kept = {range(config.depth)[i] for i in return_attention}
        with device_of([images]):
            run = _Run(self._weights_beside(images), images.dtype, backend, kernel)
            x = embed = self._embed(run, images)
            states: list[Array] = []
            seen: dict[int, BlockAttention] = {}
            for i in range(config.depth):
                block = f"blocks.{i}."
                # z' = MSA(LN(z)) + z                                                          (2)
                x, seen_here = self._self_attention(run, block, x)
                # z = MLP(LN(z')) + z'                                                         (3)
                x = self._mlp(run, block, block + "norm2", x)
                if i in kept:
                    seen[i] = seen_here
                if return_states:
                    states.append(x)
            if config.norm == "tokens":
                x = self._norm(run, "norm", x, x.dtype)
            features, seen_by_probe = self._pool(run, x)
            logits = self._logits(run, x, features) if config.num_classes else None
        return Result(
            x,
            features,
            logits,
            config.grid_of(images.shape[2:]),
            config.prefix_tokens,
            config.class_token,
            config.depth,
            embed if return_states else None,
            tuple(states),
            seen,
            seen_by_probe if kept else None,
        )

    def _check(self, images: Array) -> None:
        config = self.config
        if images.ndim != 4 or images.shape[1] != config.channels:
            raise ValueError(
                f"images must be (batch, channels, height, width) with {config.channels} "
                f"channel(s), got {images.shape}"
            )
        size = images.shape[2:]
        divides = all(n % p == 0 and n for n, p in zip(size, config.patch_size, strict=True))
        if size != config.image_size and not divides:
            raise ValueError(
                f"images must be {config.image_size} pixels, or of a height and a width that "
                f"divide into patches of {config.patch_size}; got {size}"
            )
        if images.dtype not in DTYPES.values():
            raise TypeError(
                f"images must be preprocessed floats ({', '.join(DTYPES)}), got {images.dtype}"
            )

    def _weights_beside(self, images: Array) -> dict[str, Array]:
        """The weights for these images: on their device, in their dtype, and for their size."""
        xp = array_module(images)
        device = None if xp is np else images.device.id
        key = (xp.__name__, device, images.dtype)
        if key not in self._copies:
            dtype = images.dtype
            held = dtype if xp is not np else layers.wide(dtype)
            self._copies[key] = {
                name: xp.asarray(np.ascontiguousarray(w, dtype), dtype=held)
                for name, w in self._weights.items()
            }
        grid = self.config.grid_of(images.shape[2:])
        if grid == self.config.grid:
            return self._copies[key]
        resized = (*key, grid)
        if resized not in self._copies:
            wide = layers.wide(images.dtype)
            positions = self._weights["positions"].astype(wide, copy=False)
            positions = resize_positions(positions, grid, self.config.resize)
            self._copies[resized] = {"positions": xp.asarray(positions)}
        return self._copies[key] | self._copies[resized]

    def _embed(self, run: _Run, images: Array) -> Array:
        """Equation (1), [class token; patches E] + positions: (batch, tokens, dim)."""
        w, config = run.w, self.config
        xp = array_module(images)
        patches = split_patches(images, config.patch_size)
        # A convolution whose stride is its kernel is one matrix product over flattened patches.
        x = layers.product(patches, w["patch_embed.weight"].reshape(config.dim, -1))
        x = x.astype(layers.wide(run.dtype), copy=False)
        if config.patch_bias:
            x += w["patch_embed.bias"].astype(x.dtype, copy=False)
        x += w["positions"].reshape(-1, config.dim).astype(x.dtype, copy=False)
        if config.prefix_tokens:
            prefix = w["prefix"].astype(x.dtype, copy=False)
            prefix = xp.broadcast_to(prefix, (len(x), *prefix.shape))
            x = xp.concatenate([prefix, x], axis=1)
        return self._norm(run, "pre_norm", x, x.dtype) if config.pre_norm else x

    def _self_attention(self, run: _Run, block: str, x: Array) -> tuple[Array, BlockAttention]:
        """Every token gathers from all tokens: (batch, tokens, dim), the residual included."""
        w, config = run.w, self.config
        batch, tokens, dim = x.shape
        normed = self._norm(run, block + "norm1", x, run.dtype)
        qkv = self._linear(run, block + "qkv", normed)
        qkv = qkv.reshape(batch, tokens, 3, config.heads, dim // config.heads)
        # Three views of the packed array, which attention reads in place.
        q, k, v = (qkv[:, :, part] for part in range(3))
        if config.qk_norm:
            q = self._norm(run, block + "q_norm", q, run.dtype)
            k = self._norm(run, block + "k_norm", k, run.dtype)
        out, seen = self._attention(run, q, k, v)
        projected = layers.product(out, w[block + "proj.weight"])
        scale = w.get(block + "scale1")
        return layers.add_scaled(x, projected, w[block + "proj.bias"], scale), seen

    def _attention(self, run: _Run, q: Array, k: Array, v: Array) -> tuple[Array, BlockAttention]:
        """Attention of (batch, tokens, heads, head_dim); its result has the heads side by side."""
        out, lse = attention(
            q, k, v, layout="bnhd", return_lse=True, backend=run.backend, kernel=run.kernel
        )
        seen = BlockAttention(q.swapaxes(1, 2), k.swapaxes(1, 2), lse)
        batch, tokens, heads, head_dim = out.shape
        return out.reshape(batch, tokens, heads * head_dim), seen

    def _mlp(self, run: _Run, block: str, norm: str, x: Array) -> Array:
        """Every token by itself: widened, bent, narrowed again, the residual included."""
        w = run.w
        normed = self._norm(run, norm, x, run.dtype)
        hidden = layers.product(normed, w[block + "fc1.weight"])
        bias, activation = w[block + "fc1.bias"], self.config.activation
        hidden = layers.activate(hidden, bias, activation, run.dtype)
        y = layers.product(hidden, w[block + "fc2.weight"])
        return layers.add_scaled(x, y, w[block + "fc2.bias"], w.get(block + "scale2"))

    def _pool(self, run: _Run, x: Array) -> tuple[Array, BlockAttention | None]:
        """The features of every image, y = LN(z of the class token) in equation (4)."""
        config, pool = self.config, self.config.pool
        pooled = x if config.pool_prefix else x[:, config.prefix_tokens :]
        seen = None
        if pool == "map":
            features, seen = self._pool_by_attention(run, pooled)
        elif pool == "avg":
            features = pooled.mean(axis=1)
        elif pool == "token+avg":
            features = array_module(x).concatenate([x[:, 0], pooled.mean(axis=1)], axis=-1)
        elif pool == "token+distillation":
            features = (x[:, 0] + x[:, 1]) / 2
        else:
            features = x[:, 0]
        if config.norm == "pooled":
            features = self._norm(run, "pooled_norm", features, x.dtype)
        if config.representation:
            narrow = features.astype(run.dtype, copy=False)
            features = self._linear(run, "representation", narrow).astype(x.dtype, copy=False)
            features = array_module(x).tanh(features)
        return features, seen

    def _pool_by_attention(self, run: _Run, x: Array) -> tuple[Array, BlockAttention]:
        """What the probe gathers from the tokens, and an MLP: (batch, dim)."""
        w, config = run.w, self.config
        batch, tokens, dim = x.shape
        head_dim = dim // config.heads
        weight, bias = w["pool.qkv.weight"], w["pool.qkv.bias"]
        q = layers.linear(w["pool.probe"][None], weight[:dim], bias[:dim], run.dtype)
        narrow = x.astype(run.dtype, copy=False)
        kv = layers.linear(narrow, weight[dim:], bias[dim:], run.dtype)
        q = array_module(x).broadcast_to(
            q.reshape(1, 1, config.heads, head_dim), (batch, 1, config.heads, head_dim)
        )
        kv = kv.reshape(batch, tokens, 2, config.heads, head_dim)
        out, seen = self._attention(run, q, kv[:, :, 0], kv[:, :, 1])
        gathered = self._linear(run, "pool.proj", out).astype(x.dtype, copy=False)
        return self._mlp(run, "pool.", "pool.norm", gathered)[:, 0], seen

    def _logits(self, run: _Run, x: Array, features: Array) -> Array:
        def head(name: str, y: Array) -> Array:
            return self._linear(run, name, y.astype(run.dtype, copy=False)).astype(x.dtype)

        if self.config.pool == "token+distillation":
            return (head("head", x[:, 0]) + head("head_dist", x[:, 1])) / 2
        return head("head", features)

    def _linear(self, run: _Run, name: str, x: Array) -> Array:
        weight, bias = run.w[name + ".weight"], run.w.get(name + ".bias")
        return layers.linear(x, weight, bias, run.dtype)

    def _norm(self, run: _Run, name: str, x: Array, dtype: Any) -> Array:
        weight, bias = run.w[name + ".weight"], run.w[name + ".bias"]
        return layers.layer_norm(x, weight, bias, self.config.eps, dtype)


def split_patches(images: Array, patch_size: tuple[int, int]) -> Array:
    """Cut images into flattened patches, row by row; what is left over at the end is cut off.

    Parameters
    ----------
    images : array (batch, channels, height, width)
        At least one patch high and wide.
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
    whole = images[:, :, : rows * patch_height, : cols * patch_width]
    grid = whole.reshape(batch, channels, rows, patch_height, cols, patch_width)
    patches = grid.transpose(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, rows * cols, channels * patch_height * patch_width)
