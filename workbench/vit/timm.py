"""Checkpoints of timm: ViT, DeiT, DINOv2, and the image towers of CLIP and SigLIP.

The architecture's name gives the arguments of timm's VisionTransformer
(``data/timm_architectures.json`` has them as timm 1.0 does), and ``model_args`` in config.json
override them.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import math
from collections.abc import Mapping
from typing import Any

from workbench.vit.entries import choice, flag, integer, mapping, number, numbers, pair
from workbench.vit.images import Preprocessing
from workbench.vit.model import ViTConfig
from workbench.vit.names import Description, Names

NAMES = Names(
    {
        "class_token": "cls_token",
        "distillation_token": "dist_token",
        "registers": "reg_token",
        "positions": "pos_embed",
        "patch_embed": "patch_embed.proj.{p}",
        "pre_norm": "norm_pre.{p}",
        "norm1": "blocks.{i}.norm1.{p}",
        "qkv": "blocks.{i}.attn.qkv.{p}",
        "q_norm": "blocks.{i}.attn.q_norm.{p}",
        "k_norm": "blocks.{i}.attn.k_norm.{p}",
        "proj": "blocks.{i}.attn.proj.{p}",
        "scale1": "blocks.{i}.ls1.gamma",
        "norm2": "blocks.{i}.norm2.{p}",
        "fc1": "blocks.{i}.mlp.fc1.{p}",
        "fc2": "blocks.{i}.mlp.fc2.{p}",
        "scale2": "blocks.{i}.ls2.gamma",
        "norm": "norm.{p}",
        "pool.probe": "attn_pool.latent",
        "pool.qkv": {"attn_pool.q.{p}": 1, "attn_pool.kv.{p}": 2},
        "pool.proj": "attn_pool.proj.{p}",
        "pool.norm": "attn_pool.norm.{p}",
        "pool.fc1": "attn_pool.mlp.fc1.{p}",
        "pool.fc2": "attn_pool.mlp.fc2.{p}",
        "pooled_norm": "fc_norm.{p}",
        "head": "head.{p}",
        "head_dist": "head_dist.{p}",
    }
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
POOLS = {"token": "token", "avg": "avg", "map": "map"}

# timm's own defaults. The last three are ours: parts of norm_layer, mlp_layer and of the class.
DEFAULTS: dict[str, Any] = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "num_classes": 1000,
    "global_pool": "token",
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "reg_tokens": 0,
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "pool_include_prefix": False,
    "act_layer": None,
    "norm_eps": 1e-6,
    "swiglu": False,
    "distilled": False,
}
# Arguments that the model here has no choice in: other values than these would change the answer.
FIXED: dict[str, Any] = {
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "proj_bias": True,
    "pos_embed": "learn",
    "dynamic_img_pad": False,
    "embed_norm_layer": None,
    "norm_layer": None,
    "attn_layer": "",
}
# Arguments that do not change the answer.
IDLE = {
    "dynamic_img_size",
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
    "weight_init",
    "fix_init",
}


@functools.cache
def architectures() -> dict[str, dict[str, Any]]:
    """The arguments of every architecture, by its name."""
    file = importlib.resources.files("workbench.vit") / "data" / "timm_architectures.json"
    table: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return table


def timm_config(architecture: str, /, **model_args: Any) -> ViTConfig:
    """The configuration of a vision transformer of timm.

    Parameters
    ----------
    architecture : str
        Such as ``"vit_base_patch16_224"``; what follows a full stop, the name of the weights, is
        not looked at.
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
    return _config(_arguments(architecture, model_args))


def describe(entries: Mapping[str, Any]) -> tuple[Description, Names]:
    """What config.json says, resolved in the order in which timm resolves it."""
    # Old files have the pretrained_cfg's entries at the top.
    pretrained = mapping(entries, "pretrained_cfg") if "pretrained_cfg" in entries else entries
    model_args = mapping(entries, "model_args")
    architecture = entries["architecture"]
    if not isinstance(architecture, str):
        raise ValueError(f"architecture must be a name, got {architecture!r}")
    arguments = _arguments(architecture, {**_pretrained_args(entries, pretrained), **model_args})
    config = _config(arguments)
    positioned = 0 if flag(arguments, "no_embed_class") else config.prefix_tokens
    labels = entries.get("label_names") or pretrained.get("label_names") or ()
    if not isinstance(labels, list | tuple) or len(labels) != config.num_classes:
        labels = ()
    preprocessing = _preprocessing(config, pretrained)
    return Description(config, preprocessing, positioned, tuple(map(str, labels))), NAMES


def _arguments(architecture: str, model_args: Mapping[str, Any]) -> dict[str, Any]:
    name = architecture.partition(".")[0]
    table = architectures()
    if name not in table:
        near = difflib.get_close_matches(name, table, n=3)
        raise ValueError(
            f"architecture {architecture!r} is not one of the {len(table)} that are known"
            + (f"; near it are {', '.join(near)}" if near else "")
        )
    arguments = {**DEFAULTS, **table[name]}
    for key, value in model_args.items():
        if key in FIXED:
            if value != FIXED[key]:
                raise ValueError(f"{key} must be {FIXED[key]!r}, got {value!r}")
        elif key in DEFAULTS:
            arguments[key] = value
        elif key not in IDLE:
            raise ValueError(f"unknown argument {key} = {value!r}")
    return arguments


def _config(arguments: Mapping[str, Any]) -> ViTConfig:
    dim = integer(arguments, "embed_dim")
    hidden = int(dim * number(arguments, "mlp_ratio"))
    pool = choice(arguments, "global_pool", POOLS)
    fc_norm = pool == "avg" if arguments["fc_norm"] is None else flag(arguments, "fc_norm")
    norm = ("pooled" if fc_norm else "tokens") if flag(arguments, "final_norm") else "none"
    activation = "gelu" if arguments["act_layer"] is None else ""
    distilled = flag(arguments, "distilled")
    pre_norm = flag(arguments, "pre_norm")
    if arguments["init_values"] is not None:
        number(arguments, "init_values")
    swiglu = flag(arguments, "swiglu")
    return ViTConfig(
        image_size=pair(arguments, "img_size"),
        patch_size=pair(arguments, "patch_size"),
        channels=integer(arguments, "in_chans"),
        dim=dim,
        depth=integer(arguments, "depth"),
        heads=integer(arguments, "num_heads"),
        mlp_hidden=hidden // 2 if swiglu else hidden,
        num_classes=integer(arguments, "num_classes"),
        eps=number(arguments, "norm_eps"),
        activation="swiglu"
        if swiglu
        else activation or choice(arguments, "act_layer", ACTIVATIONS),
        qkv_bias=flag(arguments, "qkv_bias"),
        patch_bias=not pre_norm,
        qk_norm=flag(arguments, "qk_norm"),
        layer_scale=bool(arguments["init_values"]),
        pre_norm=pre_norm,
        norm=norm,
        class_token=flag(arguments, "class_token"),
        distillation_token=distilled,
        registers=integer(arguments, "reg_tokens"),
        pool="token+distillation" if distilled else pool,
        pool_prefix=flag(arguments, "pool_include_prefix"),
        resize="bicubic-antialias",
    )


def _pretrained_args(entries: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that timm takes from pretrained_cfg where model_args do not say otherwise."""
    args: dict[str, Any] = {}
    classes = entries.get("num_classes", pretrained.get("num_classes"))
    if classes is not None:
        args["num_classes"] = classes
    if pretrained is not entries and pretrained.get("global_pool") is not None:
        # The one at the top level is there for readers: timm does not build from it.
        args["global_pool"] = pretrained["global_pool"]
    if pretrained.get("input_size") is not None:
        channels, *size = numbers(pretrained, "input_size", 3)
        args["in_chans"] = channels
        if pretrained.get("fixed_input_size", False):
            args["img_size"] = size
    return args


def _preprocessing(config: ViTConfig, pretrained: Mapping[str, Any]) -> Preprocessing:
    """How pictures are prepared; what is left out is what timm's resolve_data_config takes."""
    crop_mode = pretrained.get("crop_mode") or "center"
    if crop_mode not in ("center", "squash"):
        raise ValueError(f"crop_mode must be 'center' or 'squash', got {crop_mode!r}")
    defaults = {
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406)[: config.channels],
        "std": (0.229, 0.224, 0.225)[: config.channels],
    }
    entries = {name: pretrained.get(name) or value for name, value in defaults.items()}
    if not isinstance(entries["interpolation"], str):
        raise ValueError(f"interpolation must be a name, got {entries['interpolation']!r}")
    crop_pct = number(entries, "crop_pct")
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct must be above 0 and at most 1, got {crop_pct}")
    height, width = (math.floor(n / crop_pct) for n in config.image_size)
    return Preprocessing(
        image_size=config.image_size,
        resize=(height, width),
        fit="exact" if crop_mode == "squash" else "shorter" if height == width else "cover",
        interpolation=entries["interpolation"],
        mean=numbers(entries, "mean", config.channels),
        std=numbers(entries, "std", config.channels),
    )
