"""Checkpoints: every family's own answers, damaged files, and configurations that do not fit."""

from __future__ import annotations

import io
import json
import math
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from workbench import vit
from workbench.vit import timm
from workbench.vit.checkpoint import INDEX
from workbench.vit.images import Preprocessing

DATA = Path(__file__).parent / "data" / "vit"
TIMM_CLS = DATA / "timm_cls"
FAMILIES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
TOLERANCE = 5e-6  # of the largest value; float32 PyTorch is within 8e-7 of the truth

Array = np.ndarray[Any, Any]


def error(got: Array, expected: Array) -> float:
    """The largest difference in units of the largest expected value; NaN counts as infinite."""
    difference = np.abs(np.asarray(got, dtype=np.float64) - expected).max()
    return float(np.nan_to_num(difference / np.abs(expected).max(), nan=np.inf))


def states(result: vit.Result) -> dict[str, Any]:
    """All of a result under the names of expected.npz."""
    named = {"embed": result.embed, "tokens": result.tokens, "features": result.features}
    named |= {f"block_{i}": block for i, block in enumerate(result.blocks)}
    return named if result.logits is None else named | {"logits": result.logits}


def known(name: str) -> dict[str, Array]:
    with np.load(DATA / name / "expected.npz") as arrays:
        return dict(arrays)


def checkpoint(name: str) -> Path:
    """What is given to `load`: a Flax file lies beside another .npz."""
    file = DATA / name / "model.npz"
    return file if file.exists() else file.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may damage."""
    return Path(shutil.copytree(TIMM_CLS, tmp_path / "model"))


# ------------------------------------------------------------------------------------ known answers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_with_its_library(name: str, backend: str) -> None:
    expected = known(name)
    model = vit.load(checkpoint(name))
    got = states(model(expected["image"], return_states=True, backend=backend))
    assert ("logits" in got) == ("logits" in expected)
    compared = [key for key in expected if key in got]
    assert {"tokens", "features"} <= set(compared)
    for key in compared:
        assert got[key].dtype == np.float32
        assert got[key].shape == expected[key].shape
        assert error(got[key], expected[key]) <= TOLERANCE, key


@pytest.mark.parametrize("name", [n for n in FAMILIES if "resized_image" in known(n)])
def test_every_family_resizes_its_positions_as_its_library(name: str) -> None:
    expected = known(name)
    model = vit.load(checkpoint(name))
    got = model(expected["resized_image"], backend="reference")
    for key in ("tokens", "features"):
        assert error(getattr(got, key), expected["resized_" + key]) <= TOLERANCE, key
    for other in {"bicubic", "bicubic-antialias", "linear-corners"} - {model.config.resize}:
        wrong = vit.ViT(replace(model.config, resize=other), model._weights)
        tokens = wrong(expected["resized_image"], backend="reference").tokens
        assert error(tokens, expected["resized_tokens"]) > 20 * TOLERANCE


@pytest.mark.parametrize("name", [n for n in FAMILIES if "pixels" in known(n)])
def test_every_family_prepares_pictures_as_its_library(name: str) -> None:
    expected = known(name)
    model = vit.load(checkpoint(name))
    got = vit.preprocess(expected["pixels"], model)[0]
    assert got.shape == expected["prepared"].shape
    np.testing.assert_allclose(got, expected["prepared"], atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "numba"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_on_cupy(name: str, backend: str) -> None:
    import cupy

    expected = known(name)
    model = vit.load(checkpoint(name))
    result = model(cupy.asarray(expected["image"]), return_states=True, backend=backend)
    for key, value in states(result).items():
        if key in expected:
            assert isinstance(value, cupy.ndarray)
            # cuBLAS may add in another order than the library's CPU run, no more.
            assert error(value.get(), expected[key]) <= TOLERANCE, key


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("timm_cls", {"eps": 1e-12}),
        ("timm_cls", {"eps": 1e-5}),
        ("timm_cls", {"heads": 8}),
        ("timm_dinov2_reg4", {"eps": 1e-5}),
        ("hf_vit", {"eps": 1e-6}),
        ("hf_clip", {"eps": 1e-6}),
        ("hf_clip", {"activation": "gelu"}),
        ("timm_clip", {"activation": "gelu"}),
        ("timm_siglip", {"activation": "gelu"}),
        ("hf_siglip", {"activation": "gelu"}),
        ("google", {"activation": "gelu"}),
    ],
    ids=str,
)
def test_known_answers_show_every_option(name: str, change: dict[str, Any]) -> None:
    model = vit.load(checkpoint(name))
    wrong = vit.ViT(replace(model.config, **change), model._weights)
    expected = known(name)
    result = wrong(expected["image"], backend="reference")
    assert error(result.features, expected["features"]) > 4 * TOLERANCE


def test_known_answers_cover_every_option() -> None:
    configs = [vit.load(checkpoint(name)).config for name in FAMILIES]
    for field, least in (("activation", 4), ("norm", 2), ("pool", 5), ("resize", 3)):
        assert len({getattr(config, field) for config in configs}) >= least, field
    for flag in ("qkv_bias", "patch_bias", "head_bias", "qk_norm", "layer_scale", "pre_norm",
                 "class_token", "distillation_token"):  # fmt: skip
        assert {getattr(config, flag) for config in configs} == {True, False}, flag
    assert {config.registers for config in configs} == {0, 4}
    assert any(config.representation for config in configs)
    assert {config.channels for config in configs} == {1, 3}


def test_labels() -> None:
    assert vit.load(DATA / "hf_dinov2").labels == ("ant", "bee", "cat", "dog", "eel")
    assert vit.load(DATA / "hf_clip_model").labels == ()
    assert vit.load(DATA / "timm_deit3").labels == ()


# -------------------------------------------------------------------------------------------- timm


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("vit_tiny_patch16_224", (192, 12, 3, 768)),
        ("vit_small_patch32_384", (384, 12, 6, 1536)),
        ("vit_base_patch8_224.augreg_in21k", (768, 12, 12, 3072)),
        ("vit_large_patch14_224", (1024, 24, 16, 4096)),
        ("vit_huge_patch14_224", (1280, 32, 16, 5120)),
    ],
)
def test_plain_architectures(name: str, sizes: tuple[int, ...]) -> None:
    config = vit.timm_config(name)
    assert (config.dim, config.depth, config.heads, config.mlp_hidden) == sizes
    name = name.partition(".")[0]
    patch, image = (int(n) for n in name.removeprefix("vit_").split("patch")[1].split("_"))
    assert config.image_size == (image, image)
    assert config.patch_size == (patch, patch)
    assert (config.num_classes, config.eps, config.qkv_bias, config.pool) == (
        1000,
        1e-6,
        True,
        "token",
    )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("deit_base_distilled_patch16_224", {"pool": "token+distillation", "heads": 12}),
        ("deit3_large_patch16_384", {"layer_scale": True, "image_size": (384, 384)}),
        ("vit_giant_patch14_reg4_dinov2", {"activation": "swiglu", "mlp_hidden": 4096,
                                           "registers": 4, "image_size": (518, 518)}),
        ("vit_base_patch32_clip_quickgelu_224", {"activation": "quick_gelu", "eps": 1e-5,
                                                 "pre_norm": True, "patch_bias": False}),
        ("vit_so400m_patch14_siglip_384", {"pool": "map", "grid": (27, 27), "class_token": False}),
        ("vit_base_patch16_siglip_gap_224", {"pool": "avg", "norm": "tokens"}),
        ("vit_base_patch16_reg4_gap_256", {"pool": "avg", "norm": "pooled", "registers": 4}),
        ("vit_base_patch16_224_miil", {"qkv_bias": False}),
        ("vit_intern300m_patch14_448", {"norm": "none"}),
    ],
)  # fmt: skip
def test_what_an_architecture_implies(name: str, wanted: dict[str, Any]) -> None:
    config = vit.timm_config(name)
    assert {key: getattr(config, key) for key in wanted} == wanted


def test_every_architecture_has_a_configuration() -> None:
    names = timm.architectures()
    assert len(names) > 140
    for name in names:
        assert vit.timm_config(name).dim % 8 == 0


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
        reg_tokens=2,
        init_values=1e-5,
        act_layer="gelu_tanh",
    )
    assert config == vit.ViTConfig(
        (32, 48), (8, 8), 1, 192, 12, 6, 480, qkv_bias=False, pool="avg", norm="pooled",
        registers=2, layer_scale=True, activation="gelu_tanh", resize="bicubic-antialias",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("resnet50", {}, r"architecture 'resnet50' is not one of the \d+ that are known$"),
        ("vit_base_patch16_225", {}, "near it are vit_base_patch16_224"),
        ("vit_dwee_patch16_reg1_gap_256", {}, "is not one of"),
        ("vit_tiny_patch16_224", {"attn_layer": "diff"}, "attn_layer must be '', got 'diff'"),
        ("vit_tiny_patch16_224", {"init_values": "1"}, "init_values must be a finite number"),
        ("vit_tiny_patch16_224", {"global_pool": "max"}, "global_pool must be one of token, avg"),
        ("vit_tiny_patch16_224", {"act_layer": "relu"}, "act_layer must be one of gelu, .* 'relu'"),
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
    assert model.preprocessing == Preprocessing((32, 32), (35, 35))


def test_load_takes_the_file_too() -> None:
    expected = known("timm_cls")
    logits = vit.load(str(TIMM_CLS / "model.safetensors"))(
        expected["image"], backend="reference"
    ).logits
    assert error(logits, expected["logits"]) <= TOLERANCE
    index = DATA / "hf_vit_sharded" / INDEX
    tokens = vit.load(index)(known("hf_vit_sharded")["image"], backend="reference").tokens
    assert error(tokens, known("hf_vit_sharded")["tokens"]) <= TOLERANCE


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
        label_names=list("abcdefghij"),
    )
    model = vit.load(folder)
    # num_classes at the top level, 10, comes before that of pretrained_cfg.
    assert model.config == vit.load(TIMM_CLS).config
    assert model.labels == tuple("abcdefghij")
    # timm's defaults for data are ImageNet's, not those of the architecture.
    assert model.preprocessing == Preprocessing(
        (32, 32), (36, 36), interpolation="bilinear",
        mean=(0.1, 0.2, 0.3), std=(0.229, 0.224, 0.225),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({"crop_mode": "squash", "crop_pct": 1.0}, {"fit": "exact", "resize": (32, 32)}),
        ({"crop_pct": 0.8}, {"fit": "shorter", "resize": (40, 40)}),
    ],
)
def test_timm_crop_modes(folder: Path, entries: dict[str, Any], wanted: dict[str, Any]) -> None:
    edit_config(folder, pretrained_cfg=entries)
    how = vit.load(folder).preprocessing
    assert {key: getattr(how, key) for key in wanted} == wanted


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


# ------------------------------------------------------------------------------------ Hugging Face


def hugging_face(tmp_path: Path, name: str, processor: Any = None, **entries: Any) -> Path:
    """A copy of a checkpoint with other entries in config.json; None removes an entry."""
    folder = Path(shutil.copytree(DATA / name, tmp_path / "model"))
    file = folder / "config.json"
    config = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_what_config_json_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    names = ["hidden_act", "layer_norm_eps", "num_channels", "qkv_bias", "use_swiglu_ffn"]
    folder = hugging_face(tmp_path, "hf_dinov2", **dict.fromkeys(names))
    assert vit.load(folder).config == vit.load(DATA / "hf_dinov2").config
    shutil.rmtree(folder)
    folder = hugging_face(tmp_path, "hf_dinov2", mlp_ratio=None)  # 4, where the file has 2
    with pytest.raises(ValueError, match=r"has shape \(32, 16\), .* asks for \(64, 16\)"):
        vit.load(folder)


@pytest.mark.parametrize(
    ("name", "processor", "wanted"),
    [
        ("hf_deit_teacher", None, Preprocessing((224, 224), (256, 256), "exact", "floor")),
        ("hf_siglip", {"size": 16}, Preprocessing((16, 16), (16, 16), "exact", "floor")),
        ("hf_vit", {"size": 32, "resample": 2, "image_mean": [0.1, 0.2, 0.3]},
         Preprocessing((32, 32), (32, 32), "exact", "floor", "bilinear", mean=(0.1, 0.2, 0.3))),
        ("hf_clip", {"size": 40, "crop_size": 32, "image_mean": [0, 0, 0], "image_std": [1, 1, 1],
                     "rescale_factor": 0.5},
         Preprocessing((32, 32), (40, 40), "shorter", "floor", rescale=0.5, mean=(0,) * 3,
                       std=(1,) * 3)),
    ],
)  # fmt: skip
def test_processors(tmp_path: Path, name: str, processor: Any, wanted: Preprocessing) -> None:
    got = vit.load(hugging_face(tmp_path, name, processor)).preprocessing
    assert got == wanted


def test_a_processor_inside_another(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path, "hf_siglip")
    (folder / "preprocessor_config.json").unlink()
    nested = {"image_processor": {"size": {"height": 20, "width": 30}}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert vit.load(folder).preprocessing.image_size == (20, 30)


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("hf_vit", {"model_type": "resnet"}, "model_type must be one of vit, deit, .* 'resnet'"),
        ("hf_vit", {"model_type": ["vit"]}, "model_type must be one of"),
        ("hf_vit", {"hidden_size": 64.0}, "hidden_size must be an integer, got 64.0"),
        ("hf_vit", {"hidden_act": "relu"}, "hidden_act must be one of gelu, .* got 'relu'"),
        ("hf_vit", {"hidden_act": None, "id2label": {"0": "a", "2": "b"}}, "none for '1'"),
        ("hf_vit", {"id2label": {"0": "a"}}, r"'classifier.weight' has shape \(10, 64\)"),
        ("hf_vit", {"id2label": 3}, "id2label must be an object, got 3"),
        ("hf_vit", {"num_attention_heads": 5}, "dim 64 does not divide into 5 heads"),
        ("hf_vit", {"qkv_bias": False}, "attention.attention.key.bias' has no place"),
        ("hf_clip_model", {"vision_config": []}, r"vision_config must be an object"),
        ("hf_clip_model", {"projection_dim": 9}, r"'visual_projection.weight' has shape \(8, 16\)"),
        ("hf_dinov2_registers", {"num_register_tokens": 3}, "register_tokens' has shape"),
        ("hf_dinov2_swiglu", {"use_swiglu_ffn": False}, "mlp.fc1.weight' is missing"),
        ("hf_siglip", {"vision_use_head": False}, "head.attention.in_proj_bias' has no"),
    ],
    ids=str,
)
def test_hugging_face_configurations_that_do_not_fit(
    tmp_path: Path, name: str, entries: dict[str, Any], message: str
) -> None:
    folder = hugging_face(tmp_path, name, **entries)
    with pytest.raises(ValueError, match=message) as caught:
        vit.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"do_resize": False}, "do_resize must be true, got false"),
        ({"do_normalize": 1}, "do_normalize must be true or false, got 1"),
        ({"size": {"longest_edge": 3}}, "size must have shortest_edge, or height and width"),
        ({"size": "big"}, "size must be one integer or two, got 'big'"),
        ({"resample": 9}, "resample must be one of 0, 1, .* got 9"),
        ({"image_mean": [0.5]}, r"image_mean must be 3 number\(s\)"),
        ({"image_mean": "grey"}, r"image_mean must be 3 number\(s\)"),
        ({"image_std": 0}, "std and rescale finite and positive"),
        ({"size": 16, "do_center_crop": True, "crop_size": 17}, "resize must be no less than"),
        ({"size": 16, "do_center_crop": True}, "crop_size must be one integer or two, got None"),
        ([], "must hold an object, got list"),
    ],
    ids=str,
)
def test_bad_processors(tmp_path: Path, processor: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vit.load(hugging_face(tmp_path, "hf_vit", processor))


# ---------------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floating_files(dtype: Any, folder: Path) -> None:
    expected = known("timm_cls")
    file = folder / "model.safetensors"
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    got = vit.load(folder)(expected["image"], backend="reference").logits
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, file)
    same = vit.load(folder)(expected["image"], backend="reference").logits
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
        ("head.bias", np.zeros(10, np.int32), "tensor 'head.bias' does not hold floats"),
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
    with pytest.raises(ValueError, match=r"and 2\d more"):
        vit.load(folder)


def raw(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header: text, or entries."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ENTRY = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
TWICE = f"{{{ENTRY},{ENTRY}}}".encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        raw(b"{"),
        raw(b"[" * 100_000),
        raw(b"\xff\xfe{}"),
        raw([1]),
        raw({"a": 3}),
        raw(TWICE, bytes(4)),
        raw({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)),
        raw({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, bytes(6)),
        raw({"a": entry([1], 4, 8)}, bytes(8)),
        raw({"a": entry([2], 0, 4)}, bytes(4)),
        raw({"a": entry([1], 0, 4)}, bytes(3)),
        raw({"a": entry([1], 0, 4)}, bytes(5)),
        raw({"a": entry([1], 4, 0)}, bytes(4)),
        raw({"a": entry([-1], 0, 4)}, bytes(4)),
        raw({"a": entry([2**62, 2**62], 0, 4)}, bytes(4)),
        raw({"a": entry([1], 0, 4, "F33")}, bytes(4)),
        raw({"a": entry([1.5], 0, 4)}, bytes(4)),
    ],
    ids=lambda content: content[:60].decode("latin1").encode("unicode_escape").decode(),
)
def test_safetensors_that_are_none(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        vit.load(folder)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("keep", [100, -1, -1000])
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
        ("[]", "must hold an object, got list"),
        ("{}", "no entry 'architecture', which timm's configurations have, nor 'model_type'"),
        ('{"architecture": 3}', "architecture must be a name, got 3"),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": 3}', "model_args must be"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"crop_mode": "border"}}',
         "crop_mode must be 'center' or 'squash', got 'border'"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"crop_pct": 1.1}}',
         "crop_pct must be above 0 and at most 1, got 1.1"),
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
    (folder / "expected.npz").unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        vit.load(folder)


def test_which_file_is_meant(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        vit.load(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin could run code when read"):
        vit.load(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"which file is meant.*a\.safetensors, b\.safe"):
        vit.load(tmp_path)
    with pytest.raises(ValueError, match=r"read from .safetensors and .npz files"):
        vit.load(tmp_path / "pytorch_model.bin")


# ------------------------------------------------------------------------------------------ shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "hf_vit_sharded", tmp_path / "sharded"))


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("weight_map"), "weight_map must be an object"),
        (lambda i: i["weight_map"].update({"layernorm.bias": 3}), "weight_map must be an object"),
        (lambda i: i["weight_map"].update({"layernorm.bias": "../x.safetensors"}),
         "'../x.safetensors' is not the name of a .safetensors file beside it"),
        (lambda i: i["weight_map"].update({"layernorm.bias": "model.bin"}), "'model.bin' is not"),
        (lambda i: i["weight_map"].pop("layernorm.bias"), "'layernorm.bias' is not in it by"),
        (lambda i: i["weight_map"].update({"x": "model-00005-of-00005.safetensors"}),
         r"model-00005-of-00005.safetensors: tensor 'x' is missing"),
        (lambda i: i["weight_map"].update(
            {"layernorm.bias": "model-00005-of-00005.safetensors"}), "'layernorm.bias' is not in"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit(sharded: Path, change: Any, message: str) -> None:
    edit_index(sharded, change)
    with pytest.raises(ValueError, match=message) as caught:
        vit.load(sharded)
    assert str(sharded) in str(caught.value)


def test_a_shard_that_is_missing_or_wrong(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00005.safetensors"
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name] = tensors[name][1:].copy()
    save_file(tensors, shard)
    with pytest.raises(ValueError, match=rf"{name}' of model-00003-of-00005.safetensors has shape"):
        vit.load(sharded)
    shard.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model-00003-of-00005.safetensors: not a safetensors"):
        vit.load(sharded)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00003-of-00005\.safetensors: no such file"):
        vit.load(sharded)


# --------------------------------------------------------------------------------------------- npz


def flax(tmp_path: Path, **changes: Array | None) -> Path:
    """Google's checkpoint with other tensors; None removes one."""
    with np.load(DATA / "google" / "model.npz") as arrays:
        tensors = dict(arrays) | {name.replace("__", "/"): x for name, x in changes.items()}
    file = tmp_path / "model.npz"
    np.savez(file, **{name: x for name, x in tensors.items() if x is not None})
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding__kernel": None}, "tensor 'embedding/kernel' is missing"),
        ({"embedding__bias": None}, "tensor 'embedding/bias' is missing"),
        ({"cls": None}, "has 17 positions, which are no square"),
        ({"embedding__kernel": np.zeros((4, 4, 3))}, "'embedding/kernel' has shape .* takes 4"),
        ({"extra": np.zeros(3)}, "tensor 'extra' has no place in this model"),
        ({"head__bias": np.zeros(5, int)}, "'head/bias' does not hold floats"),
        ({"head__bias": np.zeros(6)}, r"'head/bias' has shape \(6,\)"),
        ({"head__bias": np.array([None] * 5)}, "'head/bias' holds pickled objects"),
        ({"Transformer__encoderblock_1__LayerNorm_0__scale": None}, "encoderblock_1/.* is missing"),
    ],
)
def test_npz_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = flax(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        vit.load(file)
    assert str(file) in str(caught.value)


def test_npz_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "model.npz"
    for content in (b"", b"PK\x03\x04", (DATA / "google" / "model.npz").read_bytes()[:-30]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.npz: not an .npz file that can be read"):
            vit.load(file)
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    good = stream.getvalue()
    absurd = good.replace(b"(3,), ", b"(3000000000000,), ")
    for member, message in (
        (absurd, "tensor 'a' is no array|has .* bytes, but is said to be"),
        (good[:-8], r"has 16 bytes, but is said to be \(3,\) of float64"),
        (b"\x93NUMPY\x07\x00", "tensor 'a' is no array"),
        (b"text", "tensor 'a' is no array"),
    ):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a.npy", member)
        with pytest.raises(ValueError, match=message):
            vit.load(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", good)
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.npy", good)
    with pytest.raises(ValueError, match="'a' comes twice"):
        vit.load(file)


# ------------------------------------------------------------------------- damage of every kind


def leaves(x: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all entries of a JSON value."""
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    return [path] * bool(path) + [p for key, y in inside for p in leaves(y, (*path, key))]


def loads_or_says_why(folder: Path) -> None:
    start, said = time.perf_counter(), None
    try:
        vit.load(folder)
    except (ValueError, FileNotFoundError) as error:
        said = str(error)
    assert said is None or str(folder) in said
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("timm_siglip", "config.json"),
        ("hf_dinov2_registers", "config.json"),
        ("hf_clip_model", "config.json"),
        ("hf_deit", "preprocessor_config.json"),
        ("hf_vit_sharded", INDEX),
    ],
)
def test_no_entry_of_a_configuration_makes_it_crash(tmp_path: Path, name: str, file: str) -> None:
    folder = Path(shutil.copytree(DATA / name, tmp_path / "model"))
    (folder / "expected.npz").unlink()
    text = (folder / file).read_text()
    for path in leaves(json.loads(text)):
        for value in (None, True, -1, 0, 2**40, 10**30, math.inf, math.nan, "x", [], [1, 2], {}):
            config = json.loads(text)
            entry = config
            for key in path[:-1]:
                entry = entry[key]
            entry[path[-1]] = value
            (folder / file).write_text(json.dumps(config))
            loads_or_says_why(folder)


@pytest.mark.parametrize("name", ["timm_deit3", "google"])
def test_no_flipped_bytes_make_it_crash(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(DATA / name, tmp_path / "model"))
    (folder / "expected.npz").unlink()
    file = next(f for f in folder.iterdir() if f.suffix in (".safetensors", ".npz"))
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole)
        # The header of a safetensors file, and anywhere in an archive.
        end = 3000 if file.suffix == ".safetensors" else len(whole)
        for place in rng.integers(0, end, rng.integers(1, 4)):
            damaged[place] = rng.integers(256)
        file.write_bytes(damaged)
        loads_or_says_why(folder)
