"""The vision transformer: every option against the equations, pictures, and maps."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from scipy.special import ndtr

from workbench import attention_weights, vit
from workbench.vit import layers, maps
from workbench.vit.images import RESAMPLING, Preprocessing
from workbench.vit.model import weight_shapes
from workbench.vit.positions import interpolation, resize_positions

Array = np.ndarray[Any, Any]

SMALL = vit.ViTConfig(
    image_size=(12, 18),
    patch_size=(4, 6),
    dim=24,
    depth=2,
    heads=3,
    mlp_hidden=40,
    num_classes=5,
    eps=1e-3,
)
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 12, 18)).astype(np.float32)


def error(got: Array, expected: Array) -> float:
    """The largest difference in units of the largest expected value; NaN counts as infinite."""
    difference = np.abs(np.asarray(got, dtype=np.float64) - expected).max()
    return float(np.nan_to_num(difference / np.abs(expected).max(), nan=np.inf))


# ------------------------------------------------------------------------------------- the model

BENDS = {
    "gelu": lambda a: a * (1 + math.erf(a / math.sqrt(2))) / 2,
    "gelu_tanh": lambda a: a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) / 2,
    "quick_gelu": lambda a: a / (1 + math.exp(-1.702 * a)),
    "silu": lambda a: a / (1 + math.exp(-a)),
}


def spelled_out(config: vit.ViTConfig, w: dict[str, Array], image: Array) -> dict[str, Array]:
    """One image, in float64 and with loops, from the papers' equations alone."""

    def norm(x: Array, name: str) -> Array:
        rows = [(row - row.mean()) / math.sqrt(row.var() + config.eps) for row in x]
        return np.stack(rows) * w[name + ".weight"] + w[name + ".bias"]

    def linear(x: Array, name: str) -> Array:
        return np.einsum("ni,oi->no", x, w[name + ".weight"]) + w.get(name + ".bias", 0.0)

    def bend(x: Array) -> Array:
        if config.activation == "swiglu":
            gate, value = x[:, : config.mlp_hidden], x[:, config.mlp_hidden :]
            return np.vectorize(BENDS["silu"])(gate) * value
        return np.vectorize(BENDS[config.activation])(x)

    def gather(q: Array, k: Array, v: Array, block: str) -> Array:
        head_dim = config.dim // config.heads
        heads = []
        for h in range(config.heads):
            a, b, c = (x[:, h * head_dim :][:, :head_dim] for x in (q, k, v))
            if config.qk_norm and block != "pool.":
                a, b = norm(a, block + "q_norm"), norm(b, block + "k_norm")
            scores = np.exp(a @ b.T / math.sqrt(head_dim))
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ c)
        return linear(np.concatenate(heads, axis=1), block + "proj")

    (height, width), (patch_h, patch_w) = image.shape[1:], config.patch_size
    kernel, bias = w["patch_embed.weight"], w.get("patch_embed.bias", 0.0)
    tokens = [
        np.einsum("chw,ochw->o", image[:, y : y + patch_h, x : x + patch_w], kernel) + bias
        for y in range(0, height - patch_h + 1, patch_h)
        for x in range(0, width - patch_w + 1, patch_w)
    ]
    x = np.stack(tokens) + w["positions"].reshape(-1, config.dim)
    if "prefix" in w:
        x = np.concatenate([w["prefix"], x])
    if config.pre_norm:
        x = norm(x, "pre_norm")
    for i in range(config.depth):
        block = f"blocks.{i}."
        q, k, v = np.split(linear(norm(x, block + "norm1"), block + "qkv"), 3, axis=1)
        x = x + gather(q, k, v, block) * w.get(block + "scale1", 1.0)
        hidden = bend(linear(norm(x, block + "norm2"), block + "fc1"))
        x = x + linear(hidden, block + "fc2") * w.get(block + "scale2", 1.0)
    if config.norm == "tokens":
        x = norm(x, "norm")
    seen = x if config.pool_prefix else x[config.prefix_tokens :]
    if config.pool == "map":
        probe, qkv = w["pool.probe"][None], w["pool.qkv.weight"]
        q = probe @ qkv[: config.dim].T + w["pool.qkv.bias"][: config.dim]
        k, v = np.split(seen @ qkv[config.dim :].T + w["pool.qkv.bias"][config.dim :], 2, axis=1)
        y = gather(q, k, v, "pool.")
        y = y + linear(bend(linear(norm(y, "pool.norm"), "pool.fc1")), "pool.fc2")
    else:
        y = {
            "token": lambda: x[:1],
            "avg": lambda: seen.mean(axis=0)[None],
            "token+avg": lambda: np.concatenate([x[0], seen.mean(axis=0)])[None],
            "token+distillation": lambda: (x[:1] + x[1:2]) / 2,
        }[config.pool]()
    if config.norm == "pooled":
        y = norm(y, "pooled_norm")
    if config.representation:
        y = np.tanh(linear(y, "representation"))
    found = {"tokens": x, "features": y[0]}
    if config.pool == "token+distillation":
        found["logits"] = (linear(x[:1], "head") + linear(x[1:2], "head_dist"))[0] / 2
    elif config.num_classes:
        found["logits"] = linear(y, "head")[0]
    return found


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"qkv_bias": False, "patch_bias": False, "head_bias": False},
        {"qk_norm": True},
        {"layer_scale": True, "registers": 3},
        {"pre_norm": True, "norm": "pooled"},
        {"norm": "none"},
        {"activation": "gelu_tanh"},
        {"activation": "quick_gelu"},
        {"activation": "silu"},
        {"activation": "swiglu", "layer_scale": True},
        {"pool": "avg", "norm": "pooled"},
        {"pool": "avg", "class_token": False, "registers": 2},
        {"pool": "avg", "pool_prefix": True},
        {"pool": "map", "class_token": False, "activation": "gelu_tanh"},
        {"pool": "map", "registers": 1, "pool_prefix": True, "qk_norm": True},
        {"pool": "token+avg", "registers": 4},
        {"pool": "token+distillation", "distillation_token": True},
        {"distillation_token": True},
        {"representation": 7},
        {"channels": 1, "depth": 1},
        {"image_size": (15, 19)},
        {"depth": 0},
        {"num_classes": 0},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()) or "plain",
)
def test_every_option_against_the_equations(change: dict[str, Any]) -> None:
    config = replace(SMALL, **change)
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(0.1, 0.5, shape) for n, shape in weight_shapes(config).items()}
    images = rng.normal(0.2, 1, (2, config.channels, *config.image_size))
    result = vit.ViT(config, weights)(images, backend="reference")
    for i, image in enumerate(images):
        wanted = spelled_out(config, weights, image)
        assert (result.logits is None) == ("logits" not in wanted)
        for name, value in wanted.items():
            assert getattr(result, name).dtype == np.float64
            assert error(getattr(result, name)[i], value) < 1e-12, name


def test_states_only_on_request() -> None:
    result = vit.random_model(SMALL)(IMAGES, backend="reference")
    assert result.embed is None
    assert result.blocks == ()
    assert result.attention == {}
    assert result.pool_attention is None
    result = vit.random_model(SMALL)(
        IMAGES, return_states=True, return_attention=[-1], backend="reference"
    )
    assert result.embed.shape == (2, 10, 24)
    assert [block.shape for block in result.blocks] == [(2, 10, 24)] * 2
    assert list(result.attention) == [1]
    assert np.abs(result.blocks[0] - result.embed).max() > 0.01
    assert (result.grid, result.prefix_tokens, result.has_class_token) == ((3, 3), 1, True)


def test_batch_is_its_images_one_by_one() -> None:
    model = vit.random_model(SMALL)
    images = np.random.default_rng(0).normal(size=(3, 3, 12, 18)).astype(np.float32)
    together = model(images, backend="reference").logits
    for image, logits in zip(images, together, strict=True):
        alone = model(image[None], backend="reference").logits[0]
        np.testing.assert_allclose(logits, alone, rtol=1e-5, atol=1e-5)
    assert model(images[:0], backend="reference").logits.shape == (0, 5)


def test_images_are_left_alone() -> None:
    before = IMAGES.copy()
    vit.random_model(SMALL)(IMAGES, backend="reference")
    np.testing.assert_array_equal(IMAGES, before)


def test_a_model_gives_the_same_answer_again() -> None:
    model = vit.random_model(SMALL)
    first = model(IMAGES, backend="cpu").logits
    model(IMAGES.astype(np.float64), backend="cpu")
    model(np.zeros((1, 3, 8, 12), np.float32), backend="cpu")
    np.testing.assert_array_equal(model(IMAGES, backend="cpu").logits, first)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves(dtype: Any, backend: str, activation: str) -> None:
    config = replace(SMALL, activation=activation)
    model = vit.random_model(config)
    images = IMAGES.astype(dtype)
    got = model(images, return_attention=[0], backend=backend)
    exact = model(images.astype(np.float64), backend="reference")
    assert got.attention[0].q.dtype == dtype
    unit = float(ml_dtypes.finfo(dtype).eps)
    for name in ("tokens", "features", "logits"):
        value = getattr(got, name)
        assert value.dtype == np.float32
        assert 0 < error(value, getattr(exact, name)) < 4 * unit


@pytest.mark.parametrize(
    ("images", "kind", "message"),
    [
        (np.zeros((3, 12, 18), np.float32), ValueError, r"with 3 channel\(s\), got \(3, 12, 18\)"),
        (np.zeros((1, 1, 12, 18), np.float32), ValueError, r"got \(1, 1, 12, 18\)"),
        (np.zeros((1, 3, 12, 17), np.float32), ValueError, r"patches of \(4, 6\); got \(12, 17\)"),
        (np.zeros((1, 3, 0, 18), np.float32), ValueError, r"got \(0, 18\)"),
        (np.zeros((1, 3, 12, 18), np.uint8), TypeError, "preprocessed floats .* got uint8"),
        ([[0.0]], TypeError, "images is a list; it takes a NumPy or CuPy array"),
    ],
)
def test_wrong_images(images: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        vit.random_model(SMALL)(images, backend="reference")


def test_unknown_block_number() -> None:
    with pytest.raises(IndexError):
        vit.random_model(SMALL)(IMAGES, return_attention=[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "dim 24 does not divide into 5 heads"),
        ({"patch_size": (13, 6)}, r"image_size \(12, 18\) is less than one patch of \(13, 6\)"),
        ({"dim": 0}, "dim must be positive"),
        ({"patch_size": (0, 6)}, "patch_size must be positive"),
        ({"depth": -1}, "depth must not be negative, got -1"),
        ({"registers": -1}, "registers must not be negative"),
        ({"pool": "max"}, "pool must be one of token, avg, map, .* got 'max'"),
        ({"norm": "batch"}, "norm must be one of tokens, pooled, none, got 'batch'"),
        ({"activation": "relu"}, "activation must be one of gelu, .* got 'relu'"),
        ({"resize": "nearest"}, "resize must be one of bicubic, .* got 'nearest'"),
        ({"class_token": False}, 'pool="token" needs class_token=True'),
        ({"class_token": False, "pool": "token+avg"}, "needs class_token=True"),
        ({"pool": "token+distillation"}, "needs distillation_token=True"),
        ({"pool": "map", "activation": "swiglu"}, "does not go with"),
        ({"pool": "token+avg", "norm": "pooled"}, "does not go with"),
        (
            {"pool": "token+distillation", "distillation_token": True, "representation": 3},
            "goes without a representation",
        ),
        ({"eps": math.nan}, "eps must be finite"),
    ],
)
def test_impossible_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_weights_that_do_not_fit() -> None:
    weights = dict(vit.random_model(SMALL)._weights)
    with pytest.raises(ValueError, match=r"labels are 2, but num_classes is 5"):
        vit.ViT(SMALL, weights, labels=("a", "b"))
    weights["norm.bias"] = weights["norm.bias"][1:]
    weights["extra"] = weights.pop("prefix")
    with pytest.raises(ValueError, match="'prefix' is missing; 'extra' has no place") as caught:
        vit.ViT(SMALL, weights)
    assert "'norm.bias' has shape (23,), the configuration asks for (24,)" in str(caught.value)
    with pytest.raises(ValueError, match=r"and 2\d more"):
        vit.ViT(SMALL, {})


@pytest.mark.parametrize("name", [*layers.ACTIVATIONS, "swiglu"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activations(
    name: str, compiled: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "COMPILED_ELEMENTS", 0 if compiled else 1 << 60)
    rng = np.random.default_rng(2)
    x = np.concatenate([np.linspace(-30, 30, 2407), rng.normal(size=593)]).reshape(10, 300)
    bias = rng.normal(size=300)
    x, bias = x.astype(dtype), bias.astype(dtype)
    t = (x + bias).astype(np.float64)
    width = 150 if name == "swiglu" else 300
    with np.errstate(over="ignore"):
        exact = np.vectorize(BENDS["silu" if name == "swiglu" else name])(t[:, :width])
    if name == "swiglu":
        exact = exact * t[:, width:]
    got = layers.activate(x.copy(), bias, name, dtype)
    assert got.dtype == dtype
    unit = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(got, exact, rtol=8 * unit, atol=4 * unit)


def test_the_compiled_gelu_at_the_ends() -> None:
    from workbench.cpu import activate

    x = np.array([[0.0, -0.0, 1e30, -1e30, np.inf, np.nan, 3e38, -20.0, 1e-30, -6.0]], np.float32)
    activate(x, np.zeros(10, np.float32), 10)
    wanted = [0, 0, 1e30, 0, np.inf, np.nan, 3e38, 0, 5e-31, -6 * ndtr(-6.0)]
    np.testing.assert_allclose(x[0], np.array(wanted, np.float32), rtol=1e-6, atol=2e-9)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_layer_norm(dtype: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "COMPILED_ELEMENTS", 0 if compiled else 1 << 60)
    rng = np.random.default_rng(4)
    x = rng.normal(3, 2, (5, 2, 24)).astype(dtype).swapaxes(0, 1)
    weight, bias = rng.normal(size=(2, 24)).astype(layers.wide(dtype))
    got = layers.layer_norm(x, weight, bias, 1e-3, dtype)
    exact = x.astype(np.float64)
    exact = exact - exact.mean(-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3) * weight + bias
    assert got.dtype == dtype
    assert error(got, exact) < 4 * float(ml_dtypes.finfo(dtype).eps)


def test_random_models_are_seeded() -> None:
    images = np.ones((1, 3, 12, 18), np.float32)
    logits = [
        vit.random_model(SMALL, seed)(images, backend="reference").logits for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 0.01
    assert all(np.isfinite(each).all() for each in logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"activation": "swiglu", "layer_scale": True, "qk_norm": True},
        {"pool": "map", "activation": "gelu_tanh", "pre_norm": True},
        {"activation": "quick_gelu", "representation": 7},
    ],
    ids=["plain", "swiglu", "map", "quick"],
)
def test_everything_stays_on_the_gpu(change: dict[str, Any], dtype: str) -> None:
    import cupy

    weights = vit.random_model(replace(SMALL, **change))._weights
    weights = {name: np.asfortranarray(w) for name, w in weights.items()}
    model = vit.ViT(replace(SMALL, **change), weights)
    images = IMAGES.astype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    got = model(cupy.asarray(images), return_states=True, return_attention=[0, 1])
    exact = model(images.astype(np.float64), backend="reference")
    unit = float(ml_dtypes.finfo(images.dtype).eps)
    for name in ("tokens", "features", "logits"):
        value = getattr(got, name)
        assert isinstance(value, cupy.ndarray)
        assert error(value.get(), getattr(exact, name)) < 16 * unit
    for each in (vit.rollout(got), vit.keep_mass(vit.attention_map(got), 0.6)):
        assert isinstance(each, cupy.ndarray)
        assert np.isfinite(each.get()).all()


# ----------------------------------------------------------------------------- position embeddings


@pytest.mark.parametrize("method", ["bicubic", "bicubic-antialias", "linear-corners"])
def test_resized_positions_keep_what_is_constant_and_straight(method: str) -> None:
    for old, new in ((4, 7), (7, 4), (5, 5), (3, 1), (1, 3)):
        matrix = interpolation(old, new, method)
        assert matrix.shape == (new, old)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(interpolation(5, 5, method), np.eye(5), atol=1e-12)
    positions = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    assert resize_positions(positions, (4, 5), method) is positions
    resized = resize_positions(positions, (6, 3), method)
    assert resized.shape == (6, 3, 3)
    assert resized.dtype == np.float32


def test_the_corners_of_linear_interpolation_stay() -> None:
    matrix = interpolation(4, 7, "linear-corners")
    np.testing.assert_allclose(matrix @ [0, 2, 4, 6], np.arange(7))


# --------------------------------------------------------------------------------------- pictures


def shrink(
    pixels: np.ndarray[Any, Any], size: int, axis: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Antialiased bicubic resampling along one axis by its definition: a = -1/2, 8-bit result."""
    pixels = np.moveaxis(pixels.astype(np.float64), axis, 0)
    scale = len(pixels) / size
    widen = max(scale, 1)
    rows = []
    for i in range(size):
        centre = (i + 0.5) * scale
        reach = np.arange(len(pixels)) + 0.5 - centre
        x = np.abs(reach) / widen
        near = 1.5 * x**3 - 2.5 * x**2 + 1
        far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
        weights = np.where(x < 1, near, np.where(x < 2, far, 0))
        rows.append(np.tensordot(weights / weights.sum(), pixels, axes=1))
    shrunk = np.clip(np.floor(np.stack(rows) + 0.5), 0, 255)
    return np.moveaxis(shrunk, 0, axis).astype(np.uint8)


@pytest.mark.parametrize("size", [(97, 60), (60, 97), (64, 64), (40, 31)])
def test_preprocess_from_its_definition(size: tuple[int, int]) -> None:
    width, height = size
    rng = np.random.default_rng(0)
    wave = np.sin(np.arange(width) / 5) + np.cos(np.arange(height)[:, None] / 7)
    pixels = 60 * wave[..., None] + rng.normal(128, 30, (height, width, 3))
    pixels = pixels.clip(0, 255).astype(np.uint8)
    imagenet = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    how = Preprocessing((32, 32), (35, 35), **imagenet)

    target = 35
    new_width = int(target * max(width / height, 1))
    new_height = int(target * max(height / width, 1))
    small = shrink(shrink(pixels, new_width, 1), new_height, 0)
    top, left = round((new_height - 32) / 2), round((new_width - 32) / 2)
    seen = small[top : top + 32, left : left + 32].transpose(2, 0, 1) / 255
    wanted = (seen - np.reshape(how.mean, (3, 1, 1))) / np.reshape(how.std, (3, 1, 1))

    got = vit.preprocess(Image.fromarray(pixels), how)
    assert got.shape == (1, 3, 32, 32)
    assert got.dtype == np.float32
    # Pillow's fixed-point arithmetic may round a value to the other neighbour, rarely.
    levels = np.abs(got[0] - wanted) * 255 * np.reshape(how.std, (3, 1, 1))
    assert levels.max() < 1.01
    assert (levels > 0.01).mean() < 0.02


@pytest.mark.parametrize(
    ("extra", "offset"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 2), (7, 4)]
)
@pytest.mark.parametrize("wide", [True, False])
def test_centre_crop_rounds_as_torchvision(extra: int, offset: int, wide: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8 + extra, 3), dtype=np.uint8)
    wanted = pixels[:, offset : offset + 8]
    if not wide:
        pixels, wanted = pixels.swapaxes(0, 1), wanted.swapaxes(0, 1)
    how = Preprocessing((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3)
    got = vit.preprocess(pixels, how)[0]
    np.testing.assert_allclose(got, wanted.transpose(2, 0, 1) / 255, rtol=2e-7)


def test_preprocess_for_other_than_square_inputs() -> None:
    how = Preprocessing((20, 40), (25, 50), "cover", mean=(0.0,) * 3, std=(1.0,) * 3)
    # 25 x 50 is asked for; a 100 x 100 picture must be 50 x 50 to cover it.
    pixels = np.zeros((100, 100, 3), np.uint8)
    pixels[30:70] = 255  # rows 15 to 35 of the 50, of which the crop keeps these
    got = vit.preprocess(pixels, how)
    assert got.shape == (1, 3, 20, 40)
    np.testing.assert_allclose(got[0, :, 2:-2], 1)


def test_preprocess_takes_models_arrays_and_batches() -> None:
    model = vit.random_model(replace(SMALL, image_size=(16, 18)))
    picture = vit.portrait()
    one = vit.preprocess(picture, model)
    assert one.shape == (1, 3, 16, 18)
    np.testing.assert_array_equal(one, vit.preprocess(np.asarray(picture), model.preprocessing))
    two = vit.preprocess([picture, picture.rotate(180)], model)
    np.testing.assert_array_equal(two[:1], one)
    assert two.shape == (2, 3, 16, 18)
    assert np.abs(two[1] - two[0]).max() > 0.1
    assert -1 <= one.min() < 0 < one.max() <= 1


def test_preprocess_to_grey() -> None:
    how = Preprocessing((4, 4), mean=(0.0,), std=(0.5,))
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 255
    got = vit.preprocess(red, how)
    assert got.shape == (1, 1, 4, 4)
    np.testing.assert_allclose(got, 2 * 0.299, atol=0.01)  # luma of red, ITU-R 601


def test_preprocess_without_the_proportions() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)
    how = Preprocessing((6, 6), (8, 8), "exact", "floor", "box", mean=(0.0,) * 3, std=(1.0,) * 3)
    got = vit.preprocess(pixels, how)
    squashed = pixels.reshape(8, 8, 2, 3).mean(axis=2)[1:7, 1:7].transpose(2, 0, 1) / 255
    np.testing.assert_allclose(got[0], squashed, atol=0.51 / 255)


@pytest.mark.parametrize(("centre", "left"), [("round", 2), ("floor", 1)])
def test_half_a_pixel_is_rounded_as_the_library_does(centre: str, left: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 11, 3), dtype=np.uint8)
    how = Preprocessing((8, 8), centre=centre, mean=(0.0,) * 3, std=(1.0,) * 3)
    got = vit.preprocess(pixels, how)[0] * 255
    np.testing.assert_allclose(got, pixels[:, left : left + 8].transpose(2, 0, 1), atol=1e-4)


def test_preprocess_for_another_size() -> None:
    how = Preprocessing((16, 16), (20, 20))
    assert how.for_size((32, 32)) == Preprocessing((32, 32), (40, 40))
    assert how.for_size((8, 24)).resized == (10, 30)
    assert Preprocessing((16, 16)).for_size((7, 7)).resized == (7, 7)
    got = vit.preprocess(vit.portrait(), how, image_size=(32, 32))
    wanted = vit.preprocess(vit.portrait(), Preprocessing((32, 32), (40, 40)))
    np.testing.assert_array_equal(got, wanted)


def test_pictures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "map.png"
    vit.images.save_picture(vit.portrait(), file)
    whole = file.read_bytes()
    with pytest.raises(OSError, match="cannot write mode F"):
        vit.images.save_picture(Image.new("F", (9, 9)), file)
    assert file.read_bytes() == whole
    assert [f.name for f in tmp_path.iterdir()] == ["map.png"]


@pytest.mark.parametrize(
    ("picture", "kind", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), TypeError, "must be uint8, got float32"),
        (np.zeros((3, 5, 5), np.uint8), ValueError, r"got \(3, 5, 5\)"),
        (["a.jpg"], TypeError, "a PIL image or a NumPy array, got str"),
    ],
)
def test_what_preprocess_refuses(picture: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        vit.preprocess(picture, Preprocessing())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": (0, 1)}, "image_size must be positive"),
        ({"resize": (256, 200)}, r"resize must be no less than image_size, got \(256, 200\)"),
        ({"fit": "longer"}, "fit must be one of shorter, cover, exact, got 'longer'"),
        ({"centre": "left"}, "centre must be one of round, floor"),
        ({"rescale": 0.0}, "rescale finite and positive"),
        ({"interpolation": "area"}, "interpolation must be one of nearest"),
        ({"mean": (0.5,)}, "one value a channel"),
        ({"std": (1.0, 0.0, 1.0)}, "std and rescale finite and positive"),
    ],
)
def test_impossible_preprocessing(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**change)


def test_filters_are_pillows() -> None:
    for name, member in RESAMPLING.items():
        assert member is Image.Resampling[name.upper()]


def corner(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image)[0, 0]


def test_read_image_turns_it_upright(tmp_path: Path) -> None:
    pixels = np.zeros((6, 10, 3), np.uint8)
    pixels[0, 0] = (250, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise to see it
    file = tmp_path / "turned.png"
    Image.fromarray(pixels).save(file, exif=exif)
    image = vit.read_image(file)
    assert image.size == (6, 10)
    np.testing.assert_array_equal(np.asarray(image)[0, -1], (250, 0, 0))


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (Image.new("L", (3, 2), 77), (77, 77, 77)),
        (Image.new("1", (3, 2), 1), (255, 255, 255)),
        (Image.new("RGBA", (3, 2), (10, 20, 30, 0)), (10, 20, 30)),
        (Image.new("LA", (3, 2), (40, 9)), (40, 40, 40)),
        (Image.new("RGB", (3, 2), (1, 2, 3)).quantize(2), (1, 2, 3)),
        (Image.fromarray(np.full((2, 3), 0x8080, np.uint16)), (128, 128, 128)),
    ],
    ids=["grey", "bilevel", "alpha", "grey-alpha", "palette", "16-bit"],
)
def test_read_image_gives_colour(
    tmp_path: Path, image: Image.Image, colour: tuple[int, ...]
) -> None:
    file = tmp_path / "picture.png"
    image.save(file)
    read = vit.read_image(str(file))
    assert read.mode == "RGB"
    np.testing.assert_array_equal(corner(read), colour)


def test_read_image_names_bad_files(tmp_path: Path) -> None:
    jpeg = tmp_path / "whole.jpg"
    vit.portrait().save(jpeg)
    whole_png = tmp_path / "whole.png"
    vit.portrait().save(whole_png)
    floats = tmp_path / "floats.tiff"
    Image.fromarray(np.zeros((4, 4), np.float32)).save(floats)
    bad = {
        "text.jpg": b"this is not a picture\n",
        "empty.png": b"",
        "cut.jpg": jpeg.read_bytes()[:2000],
        "cut.png": whole_png.read_bytes()[:5000],
        "header.png": whole_png.read_bytes()[:20],
        "floats.tiff": floats.read_bytes(),
    }
    for name, content in bad.items():
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a picture that can be read") as caught:
            vit.read_image(file)
        assert str(caught.value).startswith(f"{file}: ")
    with pytest.raises(ValueError, match="not a picture that can be read"):
        vit.read_image(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg: no such file"):
        vit.read_image(tmp_path / "nowhere.jpg")


def test_portrait_is_shipped_with_its_origin() -> None:
    picture = vit.portrait()
    assert (picture.mode, picture.size) == ("RGB", (448, 448))
    assert np.asarray(picture).std() > 40
    text = Path(vit.__file__).with_name("data").joinpath("portrait.txt").read_text()
    assert "public domain" in text


# ------------------------------------------------------------------------------------------- maps


def looked(change: dict[str, Any] | None = None, backend: str = "reference") -> vit.Result:
    """A result with all that maps need, of a model whose heads differ."""
    config = replace(SMALL, **(change or {}))
    rng = np.random.default_rng(6)
    weights = {n: rng.normal(0.05, 0.4, shape) for n, shape in weight_shapes(config).items()}
    images = rng.normal(size=(2, 3, *config.image_size))
    return vit.ViT(config, weights)(images, return_attention=range(2), backend=backend)


def matrices(result: vit.Result) -> list[Array]:
    """The attention matrices of all blocks, in full."""
    found = []
    for q, k, _ in result.attention.values():
        scores = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
        found.append(scores / scores.sum(axis=-1, keepdims=True))
    return found


def test_attention_map_of_the_class_token_and_of_patches() -> None:
    result = looked({"registers": 2})
    first, last = matrices(result)
    shape = (2, 3, 3, 3)
    np.testing.assert_allclose(vit.attention_map(result), last[:, :, 0, 3:].reshape(shape))
    patch = vit.attention_map(result, (1, 2), block=0)
    np.testing.assert_allclose(patch, first[:, :, 3 + 5, 3:].reshape(shape))
    mean = vit.attention_map(result, (1, 2), block=-2, reduce="mean")
    np.testing.assert_allclose(mean, patch.mean(axis=1))


def test_attention_map_of_the_probe() -> None:
    for prefix in (False, True):
        change = {"pool": "map", "class_token": False, "registers": 2, "pool_prefix": prefix}
        result = looked(change)
        q, k, lse = result.pool_attention
        assert k.shape[2] == (11 if prefix else 9)
        weights = attention_weights(q, k, lse)[:, :, 0]
        np.testing.assert_allclose(weights.sum(axis=-1), 1)
        got = vit.attention_map(result)
        np.testing.assert_allclose(got, weights[..., -9:].reshape(2, 3, 3, 3))


@pytest.mark.parametrize("tile", [1, 4, 256])
@pytest.mark.parametrize("residual", [0.5, 0.0, 0.3, 1.0])
def test_rollout_is_a_row_of_the_product(residual: float, tile: int) -> None:
    result = looked({"registers": 2})
    product = np.eye(12)
    for matrix in matrices(result):
        product = ((1 - residual) * matrix.mean(axis=1) + residual * np.eye(12)) @ product
    got = vit.rollout(result, residual=residual, tile=tile)
    np.testing.assert_allclose(got, product[:, 0, 3:].reshape(2, 3, 3), atol=1e-15)
    got = vit.rollout(result, (2, 1), residual=residual, tile=tile)
    np.testing.assert_allclose(got, product[:, 3 + 7, 3:].reshape(2, 3, 3), atol=1e-15)


def test_rollout_of_the_probe() -> None:
    result = looked({"pool": "map", "class_token": False, "registers": 2})
    probe = attention_weights(*result.pool_attention, rows=0, reduce="mean")
    flow = np.concatenate([np.zeros((2, 2)), probe], axis=1)
    for matrix in reversed(matrices(result)):
        flow = (flow[:, None] @ (0.5 * matrix.mean(axis=1) + 0.5 * np.eye(11)))[:, 0]
    np.testing.assert_allclose(vit.rollout(result), flow[:, 2:].reshape(2, 3, 3))


def test_what_maps_refuse() -> None:
    result = looked()
    with pytest.raises(ValueError, match=r"query \(3, 0\) lies outside the map of 3 x 3 patches"):
        vit.attention_map(result, (3, 0))
    with pytest.raises(ValueError, match="residual must be from 0 to 1, got 2"):
        vit.rollout(result, residual=2)
    with pytest.raises(ValueError, match="tile must be positive"):
        vit.rollout(result, tile=0)
    with pytest.raises(ValueError, match="mass must be above 0 and at most 1, got 0"):
        vit.keep_mass(np.ones((2, 2)), 0)
    last = vit.random_model(SMALL)(IMAGES, return_attention=[-1], backend="reference")
    with pytest.raises(ValueError, match=r"block 0 is not in the result: .*\[0\]"):
        vit.attention_map(last, block=0)
    with pytest.raises(ValueError, match=r"needs return_attention=range\(2\).* blocks \[1\]"):
        vit.rollout(last)
    bare = replace(SMALL, pool="avg", class_token=False)
    result = vit.random_model(bare)(IMAGES, return_attention=[0, 1], backend="reference")
    with pytest.raises(ValueError, match="no class token and no probe"):
        vit.attention_map(result)
    assert vit.attention_map(result, (0, 0)).shape == (2, 3, 3, 3)
    empty = vit.random_model(replace(SMALL, depth=0))(IMAGES, backend="reference")
    with pytest.raises(ValueError, match="needs a model with blocks"):
        vit.rollout(empty)


def test_keep_mass_keeps_the_fewest_weights() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((2, 3, 4, 5))
    for mass in (0.01, 0.3, 0.6, 0.999):
        kept = vit.keep_mass(weights, mass).reshape(6, 20)
        for before, after in zip(weights.reshape(6, 20), kept, strict=True):
            chosen = after > 0
            np.testing.assert_array_equal(after[chosen], before[chosen])
            assert before[chosen].min() > before[~chosen].max(initial=0)
            total = before.sum()
            assert after.sum() >= mass * total
            assert after.sum() - after[chosen].min() < mass * total
    np.testing.assert_array_equal(vit.keep_mass(weights, 1.0), weights)
    np.testing.assert_array_equal(vit.keep_mass(np.zeros((3, 2)), 0.5), 0)


def test_contact_sheet() -> None:
    panels = [Image.new("RGB", (56, 28), (i, 0, 0)) for i in range(5)]
    sheet = np.asarray(vit.contact_sheet(panels))
    assert sheet.shape == (28 * 2 + 1, 56 * 3 + 2, 3)
    assert [sheet[0, i * 57, 0] for i in range(3)] == [0, 1, 2]
    assert [sheet[29, i * 57, 0] for i in range(3)] == [3, 4, 255]
    assert vit.contact_sheet(panels, 9).width == 56 * 5 + 4
    with pytest.raises(ValueError, match="panels must be pictures of one size"):
        vit.contact_sheet([])
    with pytest.raises(ValueError, match="columns must be positive"):
        vit.contact_sheet(panels, -1)


def test_patch_heads_are_centred_slices_of_the_patches() -> None:
    q = vit.patch_heads(vit.portrait())
    assert q.shape == (1, 12, 196, 64)
    assert q.dtype == np.float32
    np.testing.assert_allclose(q.mean(axis=2), 0, atol=1e-5)
    assert q.std() == pytest.approx(1, abs=1e-5)
    # Head 7 is the second colour (4 to 7), its last four pixel rows (12 to 15).
    pixels = np.asarray(vit.portrait().resize((224, 224), Image.Resampling.BICUBIC), np.float64)
    row, col = 5, 9
    patch = pixels[16 * row + 12 : 16 * row + 16, 16 * col : 16 * col + 16, 1].ravel()
    cut = pixels.reshape(14, 16, 14, 16, 3)[:, 12:, :, :, 1]
    centred = patch - cut.mean(axis=(0, 2)).ravel()
    ratio = q[0, 7, row * 14 + col] / centred
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)
    assert ratio[0] > 0


def test_patch_heads_of_one_colour_are_zero() -> None:
    np.testing.assert_array_equal(vit.patch_heads(Image.new("RGB", (50, 60), "teal")), 0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_patch_attention(backend: str) -> None:
    picture = vit.portrait()
    got = vit.patch_attention(picture, (6, 7), backend=backend)
    q = vit.patch_heads(picture)[0].astype(np.float64)
    scores = np.einsum("hd,hkd->hk", q[:, 6 * 14 + 7], q) / 8
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got, weights.mean(axis=0).reshape(14, 14), rtol=1e-4, atol=1e-9)
    assert got.sum() == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match=r"query \(14, 0\) lies outside the map of 14 x 14"):
        vit.patch_attention(picture, (14, 0), backend=backend)


def brightness(image: Image.Image) -> np.ndarray[Any, Any]:
    return np.asarray(image.convert("L"), dtype=np.float64)


def test_overlay_is_brightest_at_the_largest_weight() -> None:
    picture = Image.new("RGB", (300, 300), (90, 90, 90))
    weights = np.full((14, 14), 1e-4)
    weights[3, 10] = 1
    seen = vit.overlay(picture, weights)
    assert (seen.mode, seen.size) == ("RGB", (448, 448))
    grid = brightness(seen).reshape(14, 32, 14, 32).mean(axis=(1, 3))
    assert np.unravel_index(grid.argmax(), grid.shape) == (3, 10)
    assert grid.max() > 2 * np.median(grid)


def test_overlay_shows_square_roots() -> None:
    weights = np.ones((14, 14))
    weights[:, 7:] = 0.25
    seen = vit.overlay(Image.new("RGB", (300, 300), (90, 90, 90)), weights)
    for x, share in ((64, 1.0), (384, 0.5)):
        opacity = 0.35 + 0.5 * share
        wanted = (1 - opacity) * 90 + opacity * maps.colours(np.array(share))
        np.testing.assert_allclose(seen.getpixel((x, 224)), wanted, atol=0.6)


def test_overlay_does_not_overshoot() -> None:
    weights = np.zeros((14, 14))
    weights[4:10, 4:10] = 1
    seen = np.asarray(vit.overlay(Image.new("RGB", (300, 300)), weights))
    assert seen[..., 0].max() == round((0.35 + 0.5) * 254)


def test_overlay_shows_the_picture() -> None:
    picture = vit.portrait()
    seen = brightness(vit.overlay(picture, np.ones((14, 14))))
    assert np.corrcoef(seen.ravel(), brightness(picture).ravel())[0, 1] > 0.99


def test_overlay_frames_the_query() -> None:
    weights = np.zeros((4, 8))
    picture = Image.new("RGB", (64, 32), (90, 90, 90))
    how = Preprocessing((16, 32), fit="cover")
    plain = vit.overlay(picture, weights, preprocessing=how, size=256)
    framed = vit.overlay(picture, weights, query=(1, 6), preprocessing=how, size=256)
    assert plain.size == (256, 128)
    rows, cols = np.nonzero((np.asarray(plain) != np.asarray(framed)).any(axis=-1))
    # The patch is rows 32 to 63 and columns 192 to 223, and a dark edge lies around its frame.
    assert (rows.min(), rows.max()) == (31, 64)
    assert (cols.min(), cols.max()) == (191, 224)
    assert framed.getpixel((192, 32)) == (255, 255, 255)
    assert framed.getpixel((208, 48)) == plain.getpixel((208, 48))


def test_overlay_beside_the_picture() -> None:
    picture = vit.portrait()
    weights = np.random.default_rng(0).random((14, 14))
    sheet = vit.overlay(picture, weights, beside=True)
    assert sheet.size == (448 + 8 + 448, 448)
    left, right = sheet.crop((0, 0, 448, 448)), sheet.crop((456, 0, 904, 448))
    np.testing.assert_array_equal(np.asarray(left), np.asarray(picture))
    np.testing.assert_array_equal(np.asarray(right), np.asarray(vit.overlay(picture, weights)))


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (np.zeros(14), {}, r"weights must be \(rows, cols\)"),
        (np.zeros((0, 3)), {}, "not empty"),
        (np.full((2, 2), np.nan), {}, "finite and not negative"),
        (np.full((2, 2), -1.0), {}, "finite and not negative"),
        (np.zeros((2, 2)), {"query": (0, 2)}, r"query \(0, 2\) lies outside the map of 2 x 2"),
        (np.zeros((2, 2)), {"size": 0}, "size must be positive"),
    ],
)
def test_what_overlay_refuses(
    weights: np.ndarray[Any, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        vit.overlay(vit.portrait(), weights, **options)


def test_colours_rise_evenly_in_lightness() -> None:
    rgb = maps.colours(np.linspace(0, 1, 65)) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_lms = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    # OKLab's lightness (Ottosson 2020).
    lightness = np.cbrt(linear @ np.transpose(to_lms)) @ [0.21045, 0.79362, -0.00407]
    steps = np.diff(lightness)
    assert steps.min() > 0.5 * steps.mean()
    assert steps.max() < 1.5 * steps.mean()
    assert lightness[0] < 0.25
    assert lightness[-1] > 0.9


def test_importing_it_brings_neither_cupy_nor_numba() -> None:
    code = (
        "import sys, workbench.vit;"
        "print([m for m in ('cupy', 'numba', 'torch', 'matplotlib') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root
    ).stdout
    assert printed.strip() == "[]"
