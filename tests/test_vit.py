"""The vision transformer: timm's own answers, damaged files, pictures and maps."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from workbench import reference, vit
from workbench.vit import maps
from workbench.vit.images import RESAMPLING, Preprocessing
from workbench.vit.model import gelu, weight_shapes

TIMM_CLS = Path(__file__).parent / "data" / "vit" / "timm_cls"
TOLERANCE = 5e-6  # of the largest value; float32 PyTorch is within 8e-7 of the truth
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


def error(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference in units of the largest expected value; NaN counts as infinite."""
    difference = np.abs(np.asarray(got, dtype=np.float64) - expected).max()
    return float(np.nan_to_num(difference / np.abs(expected).max(), nan=np.inf))


def states(result: vit.Result) -> dict[str, Any]:
    """All of a result under the fixture's names."""
    named = {"embed": result.embed, "tokens": result.tokens, "features": result.features}
    named |= {f"block_{i}": block for i, block in enumerate(result.blocks)}
    return named if result.logits is None else named | {"logits": result.logits}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(TIMM_CLS / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    return Path(shutil.copytree(TIMM_CLS, tmp_path / "model"))


# ------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_agrees_with_timm(backend: str, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    model = vit.load(TIMM_CLS)
    got = states(model(expected["image"], return_states=True, backend=backend))
    assert set(got) == set(expected) - {"image"}
    for name, value in got.items():
        assert value.dtype == np.float32
        assert value.shape == expected[name].shape
        assert error(value, expected[name]) <= TOLERANCE, name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "numba"])
def test_agrees_with_timm_on_cupy(backend: str, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    import cupy

    model = vit.load(TIMM_CLS)
    images = cupy.asarray(expected["image"])
    result = model(images, return_states=True, return_attention=[0], backend=backend)
    for name, value in states(result).items():
        assert isinstance(value, cupy.ndarray)
        # cuBLAS may add in another order than timm's CPU run, no more.
        assert error(value.get(), expected[name]) <= TOLERANCE, name
    q, k, lse = result.attention[0]
    weights = vit.attention_map(q, k, lse, [0, -1])
    assert isinstance(weights, cupy.ndarray)
    on_host = vit.attention_map(q.get(), k.get(), lse.get(), [0, -1])
    np.testing.assert_allclose(weights.get(), on_host, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "change",
    [{"eps": 1e-12}, {"eps": 1e-5}, {"heads": 8}, {"heads": 2}],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()),
)
def test_fixture_shows_every_option(
    change: dict[str, Any], expected: dict[str, np.ndarray[Any, Any]]
) -> None:
    model = vit.load(TIMM_CLS)
    wrong = vit.ViT(replace(model.config, **change), load_file(TIMM_CLS / "model.safetensors"))
    result = wrong(expected["image"], backend="reference")
    assert error(result.tokens, expected["tokens"]) > 4 * TOLERANCE


def spelled_out(
    config: vit.ViTConfig, w: dict[str, np.ndarray[Any, Any]], image: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Logits of one image, in float64 and with loops, from the paper's equations alone."""

    def norm(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        rows = [(row - row.mean()) / math.sqrt(row.var() + config.eps) for row in x]
        return np.stack(rows) * w[name + ".weight"] + w[name + ".bias"]

    def linear(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        return np.einsum("ni,oi->no", x, w[name + ".weight"]) + w.get(name + ".bias", 0.0)

    (height, width), (patch_h, patch_w) = config.image_size, config.patch_size
    kernel, bias = w["patch_embed.proj.weight"], w["patch_embed.proj.bias"]
    tokens = [
        np.einsum("chw,ochw->o", image[:, y : y + patch_h, x : x + patch_w], kernel) + bias
        for y in range(0, height, patch_h)
        for x in range(0, width, patch_w)
    ]
    if config.class_token:
        tokens.insert(0, w["cls_token"][0, 0])
    x = np.stack(tokens) + w["pos_embed"][0]
    head_dim = config.dim // config.heads
    for i in range(config.depth):
        block = f"blocks.{i}."
        qkv = linear(norm(x, block + "norm1"), block + "attn.qkv")
        heads = []
        for h in range(config.heads):
            q, k, v = (
                qkv[:, part * config.dim + h * head_dim :][:, :head_dim] for part in range(3)
            )
            scores = np.exp(q @ k.T / math.sqrt(head_dim))
            heads.append(scores / scores.sum(axis=1, keepdims=True) @ v)
        x = x + linear(np.concatenate(heads, axis=1), block + "attn.proj")
        hidden = linear(norm(x, block + "norm2"), block + "mlp.fc1")
        bent = np.vectorize(lambda a: a * (1 + math.erf(a / math.sqrt(2))) / 2)(hidden)
        x = x + linear(bent, block + "mlp.fc2")
    if config.pool == "avg":
        first = 1 if config.class_token else 0
        pooled = norm(x[first:].mean(axis=0)[None], "fc_norm")
    else:
        pooled = norm(x, "norm")[:1]
    return linear(pooled, "head")[0]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"qkv_bias": False},
        {"pool": "avg"},
        {"pool": "avg", "class_token": False},
        {"channels": 1, "depth": 1},
        {"depth": 0},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()) or "plain",
)
def test_every_option_against_the_equations(change: dict[str, Any]) -> None:
    config = replace(SMALL, **change)
    rng = np.random.default_rng(1)
    weights = {n: rng.normal(0.1, 0.5, shape) for n, shape in weight_shapes(config).items()}
    images = rng.normal(0.2, 1, (2, config.channels, *config.image_size))
    result = vit.ViT(config, weights)(images, backend="reference")
    assert result.logits.dtype == np.float64
    for image, logits in zip(images, result.logits, strict=True):
        assert error(logits, spelled_out(config, weights, image)) < 1e-12


def test_no_head_no_logits() -> None:
    model = vit.random_model(replace(SMALL, num_classes=0))
    result = model(np.ones((1, 3, 12, 18), np.float32), backend="reference")
    assert result.logits is None
    assert result.features.shape == (1, 24)


def test_states_only_on_request() -> None:
    result = vit.random_model(SMALL)(np.ones((1, 3, 12, 18), np.float32), backend="reference")
    assert result.embed is None
    assert result.blocks == ()
    assert result.attention == {}


def test_batch_is_its_images_one_by_one() -> None:
    model = vit.random_model(SMALL)
    images = np.random.default_rng(0).normal(size=(3, 3, 12, 18)).astype(np.float32)
    together = model(images, backend="reference").logits
    for image, logits in zip(images, together, strict=True):
        alone = model(image[None], backend="reference").logits[0]
        np.testing.assert_allclose(logits, alone, rtol=1e-5, atol=1e-5)
    assert model(images[:0], backend="reference").logits.shape == (0, 5)


def test_images_are_left_alone() -> None:
    images = np.random.default_rng(0).normal(size=(1, 3, 12, 18)).astype(np.float32)
    before = images.copy()
    vit.random_model(SMALL)(images, backend="reference")
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_images_are_computed_in_float32(dtype: Any) -> None:
    images = np.random.default_rng(0).normal(size=(1, 3, 12, 18)).astype(dtype)
    model = vit.random_model(SMALL)
    got = model(images, backend="reference").logits
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, model(images.astype(np.float32), backend="reference").logits)


@pytest.mark.parametrize(
    ("images", "kind", "message"),
    [
        (np.zeros((3, 12, 18), np.float32), ValueError, r"\(batch, 3, 12, 18\), got \(3, 12, 18\)"),
        (np.zeros((1, 3, 18, 12), np.float32), ValueError, r"got \(1, 3, 18, 12\)"),
        (np.zeros((1, 1, 12, 18), np.float32), ValueError, r"got \(1, 1, 12, 18\)"),
        (np.zeros((1, 3, 12, 18), np.uint8), TypeError, "preprocessed floats.* got uint8"),
        ([[0.0]], TypeError, "NumPy or CuPy array, got list"),
    ],
)
def test_wrong_images(images: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        vit.random_model(SMALL)(images, backend="reference")


def test_unknown_block_number() -> None:
    with pytest.raises(IndexError):
        vit.random_model(SMALL)(np.zeros((1, 3, 12, 18), np.float32), return_attention=[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "dim 24 does not divide into 5 heads"),
        ({"patch_size": (5, 6)}, r"image_size \(12, 18\) does not divide into patches of \(5, 6\)"),
        ({"dim": 0}, "dim must be positive"),
        ({"patch_size": (0, 6)}, "patch_size must be positive"),
        ({"depth": -1}, "depth and num_classes must not be negative"),
        ({"pool": "map"}, 'pool must be "token" or "avg", got \'map\''),
        ({"class_token": False}, 'pool="token" needs class_token=True'),
        ({"eps": math.nan}, "eps must be finite"),
    ],
)
def test_impossible_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_gelu_is_exact_and_keeps_its_input() -> None:
    x = np.linspace(-6, 6, 241)
    exact = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x]
    np.testing.assert_allclose(gelu(x), exact, rtol=0, atol=1e-15)
    single = x.astype(np.float32)
    np.testing.assert_allclose(gelu(single), exact, rtol=0, atol=1e-6)
    assert gelu(single).dtype == np.float32
    np.testing.assert_array_equal(single, x.astype(np.float32))


def test_random_models_are_seeded() -> None:
    images = np.ones((1, 3, 12, 18), np.float32)
    logits = [
        vit.random_model(SMALL, seed)(images, backend="reference").logits for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() > 0.01
    assert all(np.isfinite(each).all() for each in logits)


# --------------------------------------------------------------------------- files and their faults


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit_tiny_patch16_224", (192, 12, 3, 768)),
        ("vit_small_patch32_384", (384, 12, 6, 1536)),
        ("vit_base_patch8_224", (768, 12, 12, 3072)),
        ("vit_large_patch14_224", (1024, 24, 16, 4096)),
        ("vit_huge_patch14_224", (1280, 32, 16, 5120)),
    ],
)
def test_timm_architectures(name: str, sizes: tuple[int, ...]) -> None:
    config = vit.timm_config(name)
    assert (config.dim, config.depth, config.heads, config.mlp_hidden) == sizes
    patch, image = (int(n) for n in name.removeprefix("vit_").split("patch")[1].split("_"))
    assert config.image_size == (image, image)
    assert config.patch_size == (patch, patch)
    assert (config.num_classes, config.eps, config.qkv_bias, config.pool) == (
        1000,
        1e-6,
        True,
        "token",
    )


def test_model_args_override_the_architecture() -> None:
    config = vit.timm_config(
        "vit_tiny_patch16_224",
        img_size=[32, 48],
        patch_size=8,
        in_chans=1,
        num_heads=6,
        mlp_ratio=2.5,
        qkv_bias=False,
        global_pool="avg",
        drop_path_rate=0.1,
        reg_tokens=0,
    )
    assert config == vit.ViTConfig((32, 48), (8, 8), 1, 192, 12, 6, 480, qkv_bias=False, pool="avg")


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("resnet50", {}, "architecture 'resnet50' is not one of"),
        ("vit_small_patch14_reg4_dinov2", {}, "is not one of"),
        ("vit_tiny_patch16_224", {"reg_tokens": 4}, "reg_tokens must be 0, got 4"),
        ("vit_tiny_patch16_224", {"init_values": 1e-5}, "init_values must be None, got 1e-05"),
        ("vit_tiny_patch16_224", {"colour": 1}, "unknown argument colour = 1"),
        ("vit_tiny_patch16_224", {"embed_dim": "64"}, "embed_dim must be an integer, got '64'"),
        ("vit_tiny_patch16_224", {"depth": True}, "depth must be an integer, got True"),
        ("vit_tiny_patch16_224", {"img_size": [32]}, r"img_size must be one integer or two"),
        (
            "vit_tiny_patch16_224",
            {"mlp_ratio": None},
            "mlp_ratio must be a finite number, got None",
        ),
        ("vit_tiny_patch16_224", {"mlp_ratio": math.inf}, "mlp_ratio must be a finite number"),
        ("vit_tiny_patch16_224", {"architecture": "x"}, "unknown argument architecture = 'x'"),
        ("vit_tiny_patch16_224", {"qkv_bias": 1}, "qkv_bias must be true or false, got 1"),
    ],
)
def test_what_timm_config_refuses(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vit.timm_config(name, **args)


def test_load_reads_the_configuration() -> None:
    model = vit.load(TIMM_CLS)
    fixture = json.loads((TIMM_CLS / "fixture.json").read_text())
    config = model.config
    assert list(config.image_size) == fixture["img_size"]
    assert list(config.patch_size) == fixture["patch"]
    assert (config.dim, config.depth, config.heads) == (
        fixture["dim"], fixture["depth"], fixture["heads"],
    )  # fmt: skip
    assert (config.mlp_hidden, config.eps) == (fixture["mlp_hidden"], fixture["eps"])
    assert model.preprocessing == Preprocessing((32, 32), 0.9, "bicubic", (0.5,) * 3, (0.5,) * 3)


def test_load_takes_the_file_too(expected: dict[str, np.ndarray[Any, Any]]) -> None:
    logits = vit.load(str(TIMM_CLS / "model.safetensors"))(
        expected["image"], backend="reference"
    ).logits
    assert error(logits, expected["logits"]) <= TOLERANCE


def edit_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_pretrained_cfg_fills_what_model_args_leave_out(folder: Path) -> None:
    edit_config(
        folder,
        model_args={"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
        pretrained_cfg={
            "input_size": [3, 32, 32],
            "fixed_input_size": True,
            "num_classes": 1000,
            "interpolation": "bilinear",
            "mean": [0.1, 0.2, 0.3],
        },
    )
    model = vit.load(folder)
    # num_classes at the top level, 10, comes before that of pretrained_cfg.
    assert model.config == vit.load(TIMM_CLS).config
    # timm's defaults for data are ImageNet's, not those of the architecture.
    assert model.preprocessing == Preprocessing(
        (32, 32), 0.875, "bilinear", (0.1, 0.2, 0.3), (0.229, 0.224, 0.225)
    )


def test_grey_models(folder: Path) -> None:
    edit_config(
        folder,
        pretrained_cfg={
            "input_size": [1, 32, 32],
            "fixed_input_size": True,
            "mean": [0.5],
            "std": [0.25],
        },
    )
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"][:, :1].copy()
    save_file(tensors, file)
    model = vit.load(folder)
    assert model.config.channels == 1
    images = vit.preprocess(vit.portrait(), model)
    assert images.shape == (1, 1, 32, 32)
    assert model(images, backend="reference").logits.shape == (1, 10)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floating_files(
    dtype: Any, folder: Path, expected: dict[str, np.ndarray[Any, Any]]
) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    got = vit.load(folder)(expected["image"], backend="reference").logits
    widened = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    same = vit.ViT(vit.load(folder).config, widened)(expected["image"], backend="reference").logits
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, same)


def test_bfloat16_needs_no_import_by_the_user(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({n: t.astype(ml_dtypes.bfloat16) for n, t in load_file(file).items()}, file)
    code = f"from workbench import vit; vit.load({str(folder)!r})"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm.bias", None, "tensor 'norm.bias' is missing"),
        ("blocks.1.attn.qkv.bias", None, "tensor 'blocks.1.attn.qkv.bias' is missing"),
        (
            "reg_token",
            np.zeros((1, 4, 64), np.float32),
            "tensor 'reg_token' has no place in this model",
        ),
        (
            "blocks.0.mlp.fc1.weight",
            np.zeros((64, 256), np.float32),
            r"tensor 'blocks.0.mlp.fc1.weight' has shape \(64, 256\), .* asks for \(256, 64\)",
        ),
        ("pos_embed", np.zeros((1, 16, 64), np.float32), r"tensor 'pos_embed' .* \(1, 17, 64\)"),
        ("head.bias", np.zeros(10, np.int32), "tensor 'head.bias' has dtype I32"),
    ],
)
def test_tensors_that_do_not_fit(
    folder: Path, name: str, change: np.ndarray[Any, Any] | None, message: str
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message) as caught:
        vit.load(folder)
    assert str(file) in str(caught.value)


def test_many_faults_make_a_short_message(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({"x": np.zeros(1, np.float32)}, file)
    with pytest.raises(ValueError, match="and 25 more"):
        vit.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -1000])
def test_truncated_weights(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        vit.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="nested"),
        ("\ufffd" * 3, "not JSON"),
        ("[]", "no entry 'architecture'"),
        ('{"model_type": "vit"}', "no entry 'architecture'"),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": 3}', "model_args must be"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"crop_mode": "squash"}}',
         "crop_mode must be 'center', got 'squash'"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": [0.5]}}',
         r"mean must be 3 number\(s\), got \[0.5\]"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"interpolation": "best"}}',
         "interpolation must be one of"),
        ('{"architecture": "vit_tiny_patch16_224", "num_classes": "ten"}',
         "num_classes must be an integer, got 'ten'"),
        ('{"architecture": "vit_tiny_patch16_224"}', "tensor 'blocks.2.norm1.weight' is missing"),
    ],
)  # fmt: skip
def test_bad_configurations(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        vit.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_files(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        vit.load(folder)


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
    how = Preprocessing((32, 32), 0.9, "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    target = 35  # floor(32 / 0.9)
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
    how = Preprocessing((8, 8), 1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    got = vit.preprocess(pixels, how)[0]
    np.testing.assert_array_equal(got, np.float32(wanted.transpose(2, 0, 1)) / np.float32(255))


def test_preprocess_for_other_than_square_inputs() -> None:
    how = Preprocessing((20, 40), 0.8, mean=(0.0,) * 3, std=(1.0,) * 3)
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
    how = Preprocessing((4, 4), 1.0, mean=(0.0,), std=(0.5,))
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 255
    got = vit.preprocess(red, how)
    assert got.shape == (1, 1, 4, 4)
    np.testing.assert_allclose(got, 2 * 0.299, atol=0.01)  # luma of red, ITU-R 601


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
        ({"crop_pct": 0}, "crop_pct must be above 0"),
        ({"crop_pct": 1.1}, "at most 1, got 1.1"),
        ({"interpolation": "area"}, "interpolation must be one of nearest"),
        ({"mean": (0.5,)}, "one value a channel"),
        ({"std": (1.0, 0.0, 1.0)}, "std finite and positive"),
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


def case(
    heads_q: int = 4, heads_kv: int = 2, tokens_q: int = 7, tokens_k: int = 9
) -> tuple[np.ndarray[Any, Any], ...]:
    """q, k, the whole map and lse of a small problem, in float64."""
    rng = np.random.default_rng(3)
    q = rng.normal(0.3, 1, (2, heads_q, tokens_q, 5))
    k = rng.normal(0.2, 1, (2, heads_kv, tokens_k, 5))
    scores = q @ np.repeat(k, heads_q // heads_kv, axis=1).swapaxes(2, 3) / math.sqrt(5)
    exps = np.exp(scores)
    total = exps.sum(axis=-1)
    return q, k, exps / total[..., None], np.log(total)


@pytest.mark.parametrize("tile", [1, 4, 9, 4096])
def test_attention_map_is_rows_of_the_softmax(tile: int) -> None:
    q, k, whole, lse = case()
    rows = [0, 3, -1, 3]
    got = vit.attention_map(q, k, lse, rows, tile=tile)
    np.testing.assert_allclose(got, whole[:, :, rows], rtol=1e-12)
    np.testing.assert_allclose(vit.attention_map(q, k, lse, 2, tile=tile), whole[:, :, 2])


def test_attention_map_follows_lse_of_attention() -> None:
    q, k, _, _ = case()
    _, lse = reference.forward(q, k, k, scale=0.7)
    got = vit.attention_map(q, k, lse, range(7), scale=0.7)
    np.testing.assert_allclose(got.sum(axis=-1), 1, rtol=1e-12)


def test_attention_map_without_leading_axes() -> None:
    q, k, whole, lse = case()
    got = vit.attention_map(q[0, 0], k[0, 0], lse[0, 0], [1])
    np.testing.assert_allclose(got, whole[0, 0, [1]], rtol=1e-12)


def test_attention_map_of_halves_is_float32() -> None:
    q, k, whole, lse = case()
    half = vit.attention_map(
        q.astype(ml_dtypes.bfloat16), k.astype(ml_dtypes.bfloat16), lse.astype(np.float32), 1
    )
    assert half.dtype == np.float32
    np.testing.assert_allclose(half, whole[:, :, 1], atol=0.02)


def test_attention_map_of_a_row_that_sees_nothing() -> None:
    q, k, whole, lse = case()
    lse[0, 1, 2] = -np.inf
    got = vit.attention_map(q, k, lse, [2, 3])
    np.testing.assert_array_equal(got[0, 1, 0], 0)
    np.testing.assert_allclose(got[1, :, 0], whole[1, :, 2])
    np.testing.assert_allclose(got[:, :, 1], whole[:, :, 3])


def test_attention_map_of_unknown_rows() -> None:
    q, k, _, lse = case()
    with pytest.raises(IndexError):
        vit.attention_map(q, k, lse, 7)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_model_keeps_what_a_map_needs(
    backend: str, expected: dict[str, np.ndarray[Any, Any]]
) -> None:
    model = vit.load(TIMM_CLS)
    result = model(expected["image"], return_states=True, return_attention=[0, -1], backend=backend)
    assert set(result.attention) == {0, 1}
    # The first block again, from the stored tokens before it, in float64.
    w = {n: t.astype(np.float64) for n, t in load_file(TIMM_CLS / "model.safetensors").items()}
    x = expected["embed"].astype(np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * w["blocks.0.norm1.weight"] + w["blocks.0.norm1.bias"]
    qkv = x @ w["blocks.0.attn.qkv.weight"].T + w["blocks.0.attn.qkv.bias"]
    q, k, _ = qkv.reshape(2, 17, 3, 4, 16).transpose(2, 0, 3, 1, 4)
    exps = np.exp(q @ k.swapaxes(2, 3) / 4)
    whole = exps / exps.sum(axis=-1, keepdims=True)
    got = vit.attention_map(*result.attention[0], range(17))
    assert error(got, whole) < 1e-5


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
    how = Preprocessing((16, 32), 1.0)
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
