"""A vision transformer from a checkpoint as it was downloaded, or with random weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from workbench.vit import google, huggingface, timm
from workbench.vit.checkpoint import open_checkpoint, read_json
from workbench.vit.model import ViT, ViTConfig, weight_shapes
from workbench.vit.names import assemble
from workbench.vit.timm import timm_config


def load(path: str | Path) -> ViT:
    """Load a vision transformer as timm, Hugging Face or Google publish it.

    The family is found by config.json and by the names of the tensors: timm's ViT, DeiT, DINOv2,
    CLIP and SigLIP; those of Hugging Face transformers; Google's .npz, which needs no config.json.
    Every tensor in the file must then have its place and its shape.

    Parameters
    ----------
    path : str or Path
        A folder with ``config.json`` and ``model.safetensors`` (or shards and their index), a file
        of weights beside its ``config.json``, or an .npz file.

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
    tensors = open_checkpoint(path)
    folder = tensors.path.parent
    if tensors.path.suffix == ".npz":
        description, names = google.describe(tensors)
    else:
        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
        entries = read_json(file)
        processor = _read_processor(folder)
        try:
            if "model_type" in entries:
                description, names = huggingface.describe(entries, processor, tensors)
            elif "architecture" in entries:
                description, names = timm.describe(entries)
            else:
                raise ValueError(
                    "no entry 'architecture', which timm's configurations have, nor 'model_type', "
                    "which Hugging Face's have"
                )
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    weights = assemble(tensors, description.config, names, description.positioned)
    return ViT(description.config, weights, description.preprocessing, description.labels)


def _read_processor(folder: Path) -> dict[str, object]:
    """The configuration of Hugging Face's image processor, where there is one."""
    file = folder / "preprocessor_config.json"
    if file.is_file():
        return read_json(file)
    file = folder / "processor_config.json"
    processor = read_json(file).get("image_processor") if file.is_file() else None
    return processor if isinstance(processor, dict) else {}


def random_model(config: ViTConfig | str = "vit_base_patch16_224", seed: int = 0) -> ViT:
    """A model with seeded random weights: right in shape and size of values, trained on nothing.

    Parameters
    ----------
    config : ViTConfig or str
        The configuration, or the name of an architecture of timm.
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
            learned_token = name in ("prefix", "positions")
            spread = 0.02 if learned_token else 1 / math.sqrt(math.prod(shape[1:]))
            w = rng.standard_normal(shape, dtype=np.float32)
            w *= np.float32(spread)
        weights[name] = w
    return ViT(config, weights)
