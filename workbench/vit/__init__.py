"""The vision transformer (Dosovitskiy et al. 2021) on NumPy and CuPy arrays.

``load`` or ``random_model`` give a `ViT`, ``read_image`` and ``preprocess`` its input,
``model(images)`` the answer, ``attention_map`` or ``rollout`` and ``overlay`` a picture of what it
looked at.
"""

from workbench.vit.images import (
    Preprocessing,
    portrait,
    preprocess,
    read_image,
    resize_and_crop,
)
from workbench.vit.maps import (
    PORTRAIT_QUERY,
    attention_map,
    contact_sheet,
    keep_mass,
    overlay,
    patch_attention,
    patch_heads,
    rollout,
)
from workbench.vit.model import BlockAttention, Result, ViT, ViTConfig
from workbench.vit.timm import timm_config
from workbench.vit.weights import load, random_model

__all__ = [
    "PORTRAIT_QUERY",
    "BlockAttention",
    "Preprocessing",
    "Result",
    "ViT",
    "ViTConfig",
    "attention_map",
    "contact_sheet",
    "keep_mass",
    "load",
    "overlay",
    "patch_attention",
    "patch_heads",
    "portrait",
    "preprocess",
    "random_model",
    "read_image",
    "resize_and_crop",
    "rollout",
    "timm_config",
]
