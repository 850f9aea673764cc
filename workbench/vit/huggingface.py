"""Checkpoints of Hugging Face transformers: ViT, DeiT, DINOv2, CLIP and SigLIP.

config.json names the family in ``model_type``; what it leaves out is what transformers 5 takes.
Which head there is, the names of the tensors tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.vit.checkpoint import Tensors
from workbench.vit.entries import choice, flag, integer, mapping, number, numbers, pair
from workbench.vit.images import Preprocessing
from workbench.vit.model import ViTConfig
from workbench.vit.names import Description, Names, Table

_LAYER = "encoder.layer.{i}."
_ATTENTION: Table = {
    "qkv": {_LAYER + f"attention.attention.{name}.{{p}}": 1 for name in ("query", "key", "value")},
    "proj": _LAYER + "attention.output.dense.{p}",
}
_EMBEDDINGS: Table = {
    "class_token": "embeddings.cls_token",
    "distillation_token": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "positions": "embeddings.position_embeddings",
    "patch_embed": "embeddings.patch_embeddings.projection.{p}",
}
_BESIDE = (r"(.*\.)?embeddings\.mask_token", r"(.*\.)?pooler\.dense\.(weight|bias)")

VIT = Names(
    {
        **_EMBEDDINGS,
        **_ATTENTION,
        "norm1": _LAYER + "layernorm_before.{p}",
        "norm2": _LAYER + "layernorm_after.{p}",
        "fc1": _LAYER + "intermediate.dense.{p}",
        "fc2": _LAYER + "output.dense.{p}",
        "norm": "layernorm.{p}",
        "head": "classifier.{p}",
    },
    ignored=_BESIDE,
)
DEIT_WITH_TEACHER = Names(
    {**VIT.table, "head": "cls_classifier.{p}", "head_dist": "distillation_classifier.{p}"},
    ignored=_BESIDE,
)
DINOV2 = Names(
    {
        **_EMBEDDINGS,
        **_ATTENTION,
        "norm1": _LAYER + "norm1.{p}",
        "scale1": _LAYER + "layer_scale1.lambda1",
        "norm2": _LAYER + "norm2.{p}",
        "fc1": _LAYER + "mlp.fc1.{p}",
        "fc2": _LAYER + "mlp.fc2.{p}",
        "scale2": _LAYER + "layer_scale2.lambda1",
        "norm": "layernorm.{p}",
        "head": "classifier.{p}",
    },
    ignored=_BESIDE,
)
DINOV2_SWIGLU = Names(
    {
        **DINOV2.table,
        "fc1": _LAYER + "mlp.weights_in.{p}",
        "fc2": _LAYER + "mlp.weights_out.{p}",
    },
    ignored=_BESIDE,
)
_TOWER_LAYER = "encoder.layers.{i}."
_TOWER: Table = {
    "positions": "embeddings.position_embedding.weight",
    "patch_embed": "embeddings.patch_embedding.{p}",
    "norm1": _TOWER_LAYER + "layer_norm1.{p}",
    "qkv": {_TOWER_LAYER + f"self_attn.{name}_proj.{{p}}": 1 for name in "qkv"},
    "proj": _TOWER_LAYER + "self_attn.out_proj.{p}",
    "norm2": _TOWER_LAYER + "layer_norm2.{p}",
    "fc1": _TOWER_LAYER + "mlp.fc1.{p}",
    "fc2": _TOWER_LAYER + "mlp.fc2.{p}",
}
# The text tower, buffers of old files, and what a classifier on the patches leaves unused.
_BESIDE_TOWER = (
    r"text_model\..*",
    r"text_projection\.weight",
    r"logit_(scale|bias)",
    r"(.*\.)?embeddings\.position_ids",
)
CLIP = Names(
    {
        **_TOWER,
        "class_token": "embeddings.class_embedding",
        "pre_norm": "pre_layrnorm.{p}",  # [sic]
        "pooled_norm": "post_layernorm.{p}",
        "head": "visual_projection.{p}",
    },
    ignored=_BESIDE_TOWER,
    leading={"class_token": 0, "positions": 0},
)
CLIP_CLASSIFIER = Names(
    {**CLIP.table, "head": "classifier.{p}"},
    ignored=(*_BESIDE_TOWER, r"(.*\.)?post_layernorm\.(weight|bias)"),
    leading=CLIP.leading,
)
SIGLIP = Names(
    {
        **_TOWER,
        "norm": "post_layernorm.{p}",
        "pool.probe": "head.probe",
        "pool.qkv": "head.attention.in_proj_{p}",
        "pool.proj": "head.attention.out_proj.{p}",
        "pool.norm": "head.layernorm.{p}",
        "pool.fc1": "head.mlp.fc1.{p}",
        "pool.fc2": "head.mlp.fc2.{p}",
        "head": "classifier.{p}",
    },
    ignored=_BESIDE_TOWER,
    leading={"positions": 0},
)
SIGLIP_CLASSIFIER = Names(
    SIGLIP.table, ignored=(*_BESIDE_TOWER, r"(.*\.)?head\..*"), leading=SIGLIP.leading
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}

_COMMON: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu",
    "qkv_bias": True,
}
_VIT = {**_COMMON, "intermediate_size": 3072, "layer_norm_eps": 1e-12}
_DINOV2 = {**_COMMON, "mlp_ratio": 4, "layer_norm_eps": 1e-6, "use_swiglu_ffn": False}
_CLIP = {
    **_COMMON,
    "intermediate_size": 3072,
    "projection_dim": 512,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP = {
    **_COMMON,
    "intermediate_size": 3072,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}
# What transformers takes where config.json says nothing.
DEFAULTS: dict[str, dict[str, Any]] = {
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": {**_DINOV2, "patch_size": 14},
    "dinov2_with_registers": {**_DINOV2, "num_register_tokens": 4},
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
}

_HALF = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
_IMAGENET = {"image_mean": (0.485, 0.456, 0.406), "image_std": (0.229, 0.224, 0.225)}
_OPENAI = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
# Likewise for preprocessor_config.json; a size of one number is a square or the shorter side.
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"size": {"height": 224, "width": 224}, "resample": 2, **_HALF},
    "deit": {
        "size": {"height": 256, "width": 256},
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_center_crop": True,
        **_HALF,
    },
    "dinov2": {
        "size": {"shortest_edge": 256},
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_center_crop": True,
        **_IMAGENET,
    },
    "clip": {
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_center_crop": True,
        **_OPENAI,
    },
    "siglip": {"size": {"height": 224, "width": 224}, "resample": 3, **_HALF},
}
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def describe(
    entries: Mapping[str, Any], processor: Mapping[str, Any], tensors: Tensors
) -> tuple[Description, Names]:
    """What the configurations and the tensors' names say, and under which names they are.

    Parameters
    ----------
    entries : mapping
        config.json.
    processor : mapping
        preprocessor_config.json, empty where there is none.
    tensors : Tensors
        Whose names are looked at.
    """
    kind = entries["model_type"]
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise ValueError(f"model_type must be one of {', '.join(DEFAULTS)}, got {kind!r}")
    family = kind.partition("_")[0]
    tower = mapping(entries, "vision_config") if kind in ("clip", "siglip") else entries
    values = {**DEFAULTS[kind], **tower}
    if kind == "clip" and "projection_dim" in entries:
        values["projection_dim"] = entries["projection_dim"]
    classes, labels = _labels(entries)
    options: dict[str, Any] = {
        "image_size": pair(values, "image_size"),
        "patch_size": pair(values, "patch_size"),
        "channels": integer(values, "num_channels"),
        "dim": integer(values, "hidden_size"),
        "depth": integer(values, "num_hidden_layers"),
        "heads": integer(values, "num_attention_heads"),
        "eps": number(values, "layer_norm_eps"),
        "qkv_bias": flag(values, "qkv_bias"),
        "activation": choice(values, "hidden_act", ACTIVATIONS),
        "resize": "bicubic",
    }
    if "intermediate_size" in values:
        options["mlp_hidden"] = integer(values, "intermediate_size")
    reader = {"vit": _vit, "deit": _deit, "dinov2": _dinov2, "clip": _clip, "siglip": _siglip}
    names, positioned = reader[family](options, values, set(tensors.entries), classes)
    config = ViTConfig(**options)
    preprocessing = _preprocessing({**PROCESSORS[family], **processor}, config, family)
    if len(labels) != config.num_classes or names is CLIP:  # a projection has no classes
        labels = ()
    return Description(config, preprocessing, positioned, labels), names


def _vit(options: dict[str, Any], _: Any, found: set[str], classes: int) -> tuple[Names, int]:
    options["num_classes"] = classes if "classifier.weight" in found else 0
    return VIT, 1


def _deit(options: dict[str, Any], _: Any, found: set[str], classes: int) -> tuple[Names, int]:
    options["distillation_token"] = True
    if "cls_classifier.weight" in found:
        options |= {"pool": "token+distillation", "num_classes": classes}
        return DEIT_WITH_TEACHER, 2
    options["num_classes"] = classes if "classifier.weight" in found else 0
    return VIT, 2


def _dinov2(
    options: dict[str, Any], values: Mapping[str, Any], found: set[str], classes: int
) -> tuple[Names, int]:
    hidden = int(options["dim"] * number(values, "mlp_ratio"))
    swiglu = flag(values, "use_swiglu_ffn")
    if swiglu:
        # Two thirds, so that the three matrices are as large as two, and a multiple of eight.
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        options["activation"] = "swiglu"
    options |= {"mlp_hidden": hidden, "layer_scale": True, "num_classes": 0}
    if "num_register_tokens" in values:
        options |= {
            "registers": integer(values, "num_register_tokens"),
            "resize": "bicubic-antialias",
        }
    if "classifier.weight" in found:
        options |= {"num_classes": classes, "pool": "token+avg"}
    return DINOV2_SWIGLU if swiglu else DINOV2, 1


def _clip(
    options: dict[str, Any], values: Mapping[str, Any], found: set[str], classes: int
) -> tuple[Names, int]:
    options |= {"pre_norm": True, "patch_bias": False, "norm": "pooled", "num_classes": 0}
    if "classifier.weight" in found:
        options |= {"norm": "none", "pool": "avg", "num_classes": classes}
        return CLIP_CLASSIFIER, 1
    if "visual_projection.weight" in found:
        options |= {"num_classes": integer(values, "projection_dim"), "head_bias": False}
    return CLIP, 1


def _siglip(
    options: dict[str, Any], values: Mapping[str, Any], found: set[str], classes: int
) -> tuple[Names, int]:
    options |= {"class_token": False, "pool": "map", "num_classes": 0}
    if "classifier.weight" in found:
        options |= {"pool": "avg", "num_classes": classes}
        return SIGLIP_CLASSIFIER, 0
    if not flag(values, "vision_use_head"):
        options["pool"] = "avg"
    return SIGLIP, 0


def _labels(entries: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """How many classes there are and what they are called, if they are."""
    named = mapping(entries, "id2label")
    if not named:
        return integer({"num_labels": entries.get("num_labels", 2)}, "num_labels"), ()
    try:
        return len(named), tuple(str(named[str(i)]) for i in range(len(named)))
    except KeyError as error:
        raise ValueError(f"id2label has {len(named)} labels, but none for {error}") from error


def _preprocessing(entries: Mapping[str, Any], config: ViTConfig, family: str) -> Preprocessing:
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not flag({name: entries.get(name, True)}, name):
            raise ValueError(f"{name} must be true, got false")
    resize, fit = _size(entries["size"], "size", family)
    image_size = resize
    if entries.get("do_center_crop", False):
        image_size, _ = _size(entries.get("crop_size"), "crop_size", "vit")
    rescale = number({"rescale_factor": entries.get("rescale_factor", 1 / 255)}, "rescale_factor")
    mean, std = (_colours(entries, name, config.channels) for name in ("image_mean", "image_std"))
    return Preprocessing(
        image_size=image_size,
        resize=resize,
        fit=fit,
        centre="floor",
        interpolation=choice({"resample": entries["resample"]}, "resample", FILTERS),
        rescale=rescale,
        mean=mean,
        std=std,
    )


def _colours(entries: Mapping[str, Any], name: str, channels: int) -> tuple[float, ...]:
    """A number a channel; a grey model takes the first of three."""
    value = entries[name]
    if isinstance(value, int | float):
        return (number(entries, name),) * channels
    three = isinstance(value, list | tuple) and len(value) == 3
    return numbers(entries, name, 3 if three else channels)[:channels]


def _size(value: Any, name: str, family: str) -> tuple[tuple[int, int], str]:
    """Height and width, and how they are meant."""
    if isinstance(value, Mapping) and "shortest_edge" in value:
        return pair(value, "shortest_edge"), "shorter"
    if isinstance(value, Mapping) and {"height", "width"} <= set(value):
        return (integer(value, "height"), integer(value, "width")), "exact"
    if isinstance(value, Mapping):
        raise ValueError(f"{name} must have shortest_edge, or height and width, got {dict(value)}")
    # Old files have one number: the shorter side for these, a square for the others.
    return pair({name: value}, name), "shorter" if family in ("clip", "dinov2") else "exact"
