"""The vision transformer (Dosovitskiy et al. 2021) on NumPy and CuPy arrays.

``load`` or ``random_model`` give a `ViT`, ``read_image`` and ``preprocess`` its input,
``model(images)`` the answer, ``attention_map`` and ``overlay`` a picture of what it looked at.
"""

from workbench.vit.images import (
    Preprocessing,
    portrait,
    preprocess,
    read_image,
    resize_and_crop,
)
from workbench.vit.maps import PORTRAIT_QUERY, attention_map, overlay, patch_attention, patch_heads
from workbench.vit.model import BlockAttention, Result, ViT, ViTConfig
from workbench.vit.weights import load, random_model, timm_config

__all__ = [
    "PORTRAIT_QUERY",
    "BlockAttention",
    "Preprocessing",
    "Result",
    "ViT",
    "ViTConfig",
    "attention_map",
    "load",
    "overlay",
    "patch_attention",
    "patch_heads",
    "portrait",
    "preprocess",
    "random_model",
    "read_image",
    "resize_and_crop",
    "timm_config",
]
