"""A vision transformer from a folder of weights in timm's names, or with random ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the bfloat16 that safetensors asks it for
import numpy as np
from safetensors import SafetensorError, safe_open

from workbench.vit.images import Preprocessing
from workbench.vit.model import ViT, ViTConfig, check_shapes, weight_shapes

# dim, depth and heads of timm's plain vision transformers, by the word in the architecture's name.
TIMM_SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
TIMM_NAME = re.compile(rf"vit_({'|'.join(TIMM_SIZES)})_patch(\d+)_(\d+)")

# Arguments of timm's VisionTransformer that the model here has no choice in: other values than
# these would change the answer.
TIMM_FIXED: dict[str, Any] = {
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
    "init_values": None,
    "pos_embed": "learn",
    "no_embed_class": False,
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "dynamic_img_size": False,
    "dynamic_img_pad": False,
    "embed_norm_layer": None,
    "norm_layer": None,
    "act_layer": None,
    "attn_layer": "",
}
# Arguments that matter in training only.
TIMM_TRAINING = {
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
    "weight_init",
    "fix_init",
}

FLOATING = ("F16", "BF16", "F32", "F64")  # safetensors' names


def load(path: str | Path) -> ViT:
    """Load a vision transformer from a folder as timm publishes it.

    The architecture's name gives the sizes and the number of heads, ``model_args`` in config.json
    override them, and every tensor in the file must then have its place and its shape.

    Parameters
    ----------
    path : str or Path
        A folder with ``config.json`` and ``model.safetensors``, or a .safetensors file beside its
        ``config.json``.

    Returns
    -------
    ViT
        float16 and bfloat16 weights are widened to float32.

    Raises
    ------
    FileNotFoundError
        A file is missing.
    ValueError
        A file is damaged, describes another kind of model, or does not match its configuration. The
        message names the file, and the tensor or the entry.
    """
    path = Path(path)
    file = path / "model.safetensors" if path.is_dir() else path
    config_file = file.parent / "config.json"
    for needed in (file, config_file):
        if not needed.is_file():
            raise FileNotFoundError(f"{needed}: no such file")
    config, preprocessing = _read_config(config_file)
    return ViT(config, _read_tensors(file, config), preprocessing)


def random_model(config: ViTConfig | str = "vit_base_patch16_224", seed: int = 0) -> ViT:
    """A model with seeded random weights: right in shape and size of values, trained on nothing.

    Parameters
    ----------
    config : ViTConfig or str
        The configuration, or the name of a plain timm architecture.
    seed : int
        The same seed gives the same weights.

    Returns
    -------
    ViT
    """
    if isinstance(config, str):
        config = timm_config(config)
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith(".bias"):
            w = np.zeros(shape, dtype=np.float32)
        elif len(shape) == 1:
            w = np.ones(shape, dtype=np.float32)
        else:
            # A linear layer keeps the variance of what it reads; learned tokens start small.
            learned_token = name in ("cls_token", "pos_embed")
            spread = 0.02 if learned_token else 1 / math.sqrt(math.prod(shape[1:]))
            w = rng.standard_normal(shape, dtype=np.float32)
            w *= np.float32(spread)
        weights[name] = w
    return ViT(config, weights)


def timm_config(architecture: str, /, **model_args: Any) -> ViTConfig:
    """The configuration of a plain timm vision transformer.

    Parameters
    ----------
    architecture : str
        ``vit_{tiny,small,base,large,huge}_patch{P}_{N}``.
    **model_args
        Arguments of timm's VisionTransformer, which override the architecture's.

    Returns
    -------
    ViTConfig

    Raises
    ------
    ValueError
        An unknown architecture, or an argument that changes the answer in a way not built here.
    """
    match = TIMM_NAME.fullmatch(architecture)
    if match is None:
        raise ValueError(
            f"architecture {architecture!r} is not one of "
            f"vit_{{{','.join(TIMM_SIZES)}}}_patch{{P}}_{{N}}"
        )
    dim, depth, heads = TIMM_SIZES[match[1]]
    args: dict[str, Any] = {
        "img_size": int(match[3]),
        "patch_size": int(match[2]),
        "in_chans": 3,
        "num_classes": 1000,
        "global_pool": "token",
        "embed_dim": dim,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "class_token": True,
    }
    for name, value in model_args.items():
        if name in TIMM_FIXED:
            if value != TIMM_FIXED[name]:
                raise ValueError(f"{name} must be {TIMM_FIXED[name]!r}, got {value!r}")
        elif name in args:
            args[name] = value
        elif name not in TIMM_TRAINING:
            raise ValueError(f"unknown argument {name} = {value!r}")
    dim = _integer(args, "embed_dim")
    ratio = args["mlp_ratio"]
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not math.isfinite(ratio):
        raise ValueError(f"mlp_ratio must be a finite number, got {ratio!r}")
    return ViTConfig(
        image_size=_pair(args, "img_size"),
        patch_size=_pair(args, "patch_size"),
        channels=_integer(args, "in_chans"),
        dim=dim,
        depth=_integer(args, "depth"),
        heads=_integer(args, "num_heads"),
        mlp_hidden=int(dim * ratio),
        num_classes=_integer(args, "num_classes"),
        qkv_bias=_flag(args, "qkv_bias"),
        class_token=_flag(args, "class_token"),
        pool=args["global_pool"],
    )


def _read_config(file: Path) -> tuple[ViTConfig, Preprocessing]:
    """The entries of config.json, resolved in the order in which timm resolves them."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    try:
        if not isinstance(entries, dict) or not isinstance(entries.get("architecture"), str):
            raise ValueError("no entry 'architecture', which timm's configurations have")
        # Old files have the pretrained_cfg's entries at the top.
        pretrained = entries.get("pretrained_cfg", entries)
        model_args = entries.get("model_args", {})
        for name, value in (("pretrained_cfg", pretrained), ("model_args", model_args)):
            if not isinstance(value, dict):
                raise ValueError(f"{name} must be an object, got {value!r}")
        config = timm_config(
            entries["architecture"], **{**_pretrained_args(entries, pretrained), **model_args}
        )
        return config, _preprocessing(config, pretrained)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _pretrained_args(entries: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that timm takes from pretrained_cfg where model_args do not say otherwise."""
    args = {}
    classes = entries.get("num_classes", pretrained.get("num_classes"))
    if classes is not None:
        args["num_classes"] = classes
    if pretrained is not entries and pretrained.get("global_pool") is not None:
        # The one at the top level is there for readers: timm does not build from it.
        args["global_pool"] = pretrained["global_pool"]
    if pretrained.get("input_size") is not None:
        channels, *size = _numbers(pretrained, "input_size", 3)
        args["in_chans"] = int(channels)
        if pretrained.get("fixed_input_size", False):
            args["img_size"] = [int(n) for n in size]
    return args


def _preprocessing(config: ViTConfig, pretrained: Mapping[str, Any]) -> Preprocessing:
    """How pictures are prepared; what is left out is what timm's resolve_data_config takes."""
    crop_mode = pretrained.get("crop_mode") or "center"
    if crop_mode != "center":
        raise ValueError(f"crop_mode must be 'center', got {crop_mode!r}")
    defaults = {
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }
    entries = {name: pretrained.get(name) or value for name, value in defaults.items()}
    if not isinstance(entries["interpolation"], str):
        raise ValueError(f"interpolation must be a name, got {entries['interpolation']!r}")
    return Preprocessing(
        image_size=config.image_size,
        crop_pct=_numbers({"crop_pct": [entries["crop_pct"]]}, "crop_pct", 1)[0],
        interpolation=entries["interpolation"],
        mean=_numbers(entries, "mean", config.channels),
        std=_numbers(entries, "std", config.channels),
    )


def _read_tensors(file: Path, config: ViTConfig) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of the file, read only after all names, shapes and dtypes are found right."""
    try:
        with safe_open(str(file), framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            check_shapes({name: s.get_shape() for name, s in slices.items()}, config, str(file))
            for name, s in slices.items():
                if s.get_dtype() not in FLOATING:
                    raise ValueError(
                        f"{file}: tensor {name!r} has dtype {s.get_dtype()}, "
                        f"not one of {', '.join(FLOATING)}"
                    )
            return {name: opened.get_tensor(name) for name in slices}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a safetensors file that can be read ({error})") from error


def _integer(args: Mapping[str, Any], name: str) -> int:
    value = args[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def _flag(args: Mapping[str, Any], name: str) -> bool:
    value = args[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def _pair(args: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Height and width from one number or two."""
    value = args[name]
    pair = value if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in pair):
        raise ValueError(f"{name} must be one integer or two, got {value!r}")
    return pair[0], pair[1]


def _numbers(entries: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    value = entries[name]
    if (
        not isinstance(value, list | tuple)
        or len(value) != count
        or any(isinstance(n, bool) or not isinstance(n, int | float) for n in value)
    ):
        raise ValueError(f"{name} must be {count} number(s), got {value!r}")
    return tuple(value)
