"""One picture through one checkpoint: what `workbench vit` does, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from workbench.checks import resolve_backend
from workbench.problem import DEVICE_BACKENDS
from workbench.vit.images import Preprocessing, preprocess, read_image
from workbench.vit.maps import attention_map, contact_sheet, keep_mass, overlay, rollout
from workbench.vit.model import Result, ViT
from workbench.vit.weights import load

STAGES = 4  # that `look` goes through, and one more for a map


@dataclass(frozen=True, slots=True)
class MapChoice:
    """Which map to draw.

    Attributes
    ----------
    query : (int, int), optional
        The patch that asks; by default the class token or the pooling probe.
    block : int
        Which block to look into.
    heads : bool
        A map of every head instead of their mean.
    rollout : bool
        The flow through all blocks instead of one block's attention.
    mass : float, optional
        Show only the largest weights, which hold this share.
    """

    query: tuple[int, int] | None = None
    block: int = -1
    heads: bool = False
    rollout: bool = False
    mass: float | None = None


@dataclass(slots=True)
class Look:
    """What was seen.

    Attributes
    ----------
    model : ViT
        The model that looked.
    image_size : (int, int)
        Height and width of what it looked at.
    backend : str
        Where it ran.
    features : numpy.ndarray (features,)
    logits : numpy.ndarray (num_classes,) or None
    map : PIL.Image.Image or None
        The map, if one was asked for.
    stages : list of (str, float)
        What was done and the seconds that it took.
    """

    model: ViT
    image_size: tuple[int, int]
    backend: str
    features: np.ndarray[Any, Any]
    logits: np.ndarray[Any, Any] | None
    map: Image.Image | None = None
    stages: list[tuple[str, float]] = field(default_factory=list)

    def top(self, count: int) -> list[tuple[str, float, float]]:
        """The likeliest classes: name, logit, and share in the softmax."""
        if self.logits is None or not self.model.config.head_bias:
            return []  # a head without a bias is a projection: its outputs are no classes
        shares = np.exp(self.logits - self.logits.max())
        shares /= shares.sum()
        best = np.argsort(-self.logits, kind="stable")[:count]
        names = self.model.labels or [str(i) for i in range(len(shares))]
        return [(names[i], float(self.logits[i]), float(shares[i])) for i in best]


def look(
    picture: Path,
    weights: Path,
    *,
    which: MapChoice | None = None,
    image_size: tuple[int, int] | None = None,
    backend: str = "auto",
    step: Callable[[str], None] = lambda _: None,
) -> Look:
    """Run a checkpoint on a picture.

    Parameters
    ----------
    picture, weights : Path
        The files; see `read_image` and `load`.
    which : MapChoice, optional
        The map to draw; none by default.
    image_size : (int, int), optional
        Height and width to look at, other than the checkpoint's own.
    backend : str
        Of attention. On a GPU the whole model runs there.
    step : callable
        Is told what is about to be done, once a stage.

    Returns
    -------
    Look
    """
    stages: list[tuple[str, float]] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        step(name)
        start = time.perf_counter()
        yield
        stages.append((name, time.perf_counter() - start))

    backend = resolve_backend(backend, False)
    with stage("read the weights"):
        model = load(weights)
    with stage("prepare the picture"):
        image = read_image(picture)
        images: Any = preprocess(image, model, image_size=image_size)
        if backend in DEVICE_BACKENDS:
            import cupy

            images = cupy.asarray(images)
    blocks = _blocks(which, model.config.depth)
    with stage(f"run the model ({backend})"):
        result = model(images, return_attention=blocks, backend=backend)
        features, logits = (_on_host(x) for x in (result.features, result.logits))
    with stage("run it again"):  # without the kernels' loading or compilation
        _on_host(model(images, backend=backend).features)
    seen = Look(model, images.shape[2:], backend, features[0], logits, stages=stages)
    if logits is not None:
        seen.logits = logits[0]
    if which is not None:
        with stage("draw the map"):
            how = model.preprocessing.for_size(seen.image_size)
            seen.map = _draw(image, result, which, how)
    return seen


def _blocks(which: MapChoice | None, depth: int) -> list[int]:
    if which is None:
        return []
    if not -depth <= which.block < depth:
        raise ValueError(f"block is {which.block}; the model has {depth}, from 0")
    return list(range(depth)) if which.rollout else [which.block]


def _on_host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x


def _draw(image: Image.Image, result: Result, which: MapChoice, how: Preprocessing) -> Image.Image:
    if which.rollout:
        maps = rollout(result, which.query)
    elif which.heads:
        maps = attention_map(result, which.query, block=which.block)[0]
    else:
        maps = attention_map(result, which.query, block=which.block, reduce="mean")
    maps = _on_host(maps)
    if which.mass is not None:
        maps = keep_mass(maps, which.mass)

    def panel(weights: Any, beside: bool = False) -> Image.Image:
        return overlay(image, weights, query=which.query, preprocessing=how, beside=beside)

    if len(maps) == 1:
        return panel(maps[0], beside=True)
    return contact_sheet([panel(weights) for weights in maps])
