"""From a picture file to the array that a vision transformer takes, step by step as in timm."""

from __future__ import annotations

import importlib.resources
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from workbench.vit.model import ViT

Picture: TypeAlias = "Image.Image | np.ndarray[Any, Any]"

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How a picture becomes a model's input; the defaults are those of timm's plain ViTs.

    Parameters
    ----------
    image_size : (int, int)
        Height and width of the input.
    crop_pct : float
        The share of the resized picture's shorter side that the centre crop keeps, at most 1.
    interpolation : str
        Pillow's filter: nearest, box, bilinear, hamming, bicubic or lanczos.
    mean, std : tuple of float
        A value a channel, for pixels in [0, 1]. One channel means a grey picture.
    """

    image_size: tuple[int, int] = (224, 224)
    crop_pct: float = 0.9
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise ValueError(f"image_size must be positive, got {self.image_size}")
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct}")
        if self.interpolation not in RESAMPLING:
            raise ValueError(
                f"interpolation must be one of {', '.join(RESAMPLING)}, got {self.interpolation!r}"
            )
        if not self.mean or len(self.std) != len(self.mean):
            raise ValueError(
                f"mean and std must have one value a channel, got {self.mean} and {self.std}"
            )
        if not all(math.isfinite(value) for value in self.mean) or not all(
            math.isfinite(value) and value > 0 for value in self.std
        ):
            raise ValueError(
                f"mean must be finite and std finite and positive, got {self.mean} and {self.std}"
            )


def read_image(path: str | Path) -> Image.Image:
    """Read a picture file upright and in colour.

    The camera's orientation tag is applied. Grey pictures become grey RGB ones, 16-bit ones are
    scaled to 8 bits, and transparency is dropped, as timm drops it.

    Parameters
    ----------
    path : str or Path
        Any format that Pillow reads.

    Returns
    -------
    PIL.Image.Image
        Mode RGB.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is not a picture, or a damaged one. The message names the file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with Image.open(path) as opened:
            # Decoding happens here: a truncated file opens but does not load.
            opened.load()
            return _rgb(ImageOps.exif_transpose(opened))
    # What Pillow's readers let through on damaged files; a bomb is a picture of absurd size.
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        KeyError,
        IndexError,
        TypeError,
        OverflowError,
        MemoryError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise ValueError(f"{path}: not a picture that can be read ({error})") from error


def portrait() -> Image.Image:
    """The photograph that the demo looks at: Grace Hopper, 448 x 448, public domain.

    Its origin is told in ``data/portrait.txt`` beside it.
    """
    file = importlib.resources.files("workbench.vit") / "data" / "portrait.jpg"
    with file.open("rb") as stream, Image.open(stream) as opened:
        return opened.convert("RGB")


def resize_and_crop(image: Picture, preprocessing: Preprocessing) -> Image.Image:
    """The part of a picture that a model sees, in the model's size.

    The picture is resized until its shorter side is ``floor(size / crop_pct)``, keeping its
    proportions, and the centre of it is cut out.

    Parameters
    ----------
    image : PIL.Image.Image or numpy.ndarray (height, width[, 3 or 4]) of uint8
        The picture.
    preprocessing : Preprocessing
        Size, crop and filter.

    Returns
    -------
    PIL.Image.Image
        Mode RGB, or L for a preprocessing of one channel.
    """
    channels = len(preprocessing.mean)
    if channels not in (1, 3):
        raise ValueError(f"a picture becomes 3 channels (colour) or 1 (grey), not {channels}")
    picture = _rgb(_pillow(image))
    if channels == 1:
        picture = picture.convert("L")
    crop_height, crop_width = preprocessing.image_size
    target_height = math.floor(crop_height / preprocessing.crop_pct)
    target_width = math.floor(crop_width / preprocessing.crop_pct)
    width, height = picture.size
    if target_height == target_width:
        # torchvision's Resize to one number: the longer side is rounded down.
        shorter = min(height, width)
        size = (target_width * width // shorter, target_height * height // shorter)
    else:
        # timm's ResizeKeepRatio: both sides are rounded.
        ratio = min(height / target_height, width / target_width)
        size = (round(width / ratio), round(height / ratio))
    # Pillow's filters widen when they shrink a picture, so this is antialiased.
    picture = picture.resize(size, RESAMPLING[preprocessing.interpolation])
    left = round((size[0] - crop_width) / 2)
    top = round((size[1] - crop_height) / 2)
    return picture.crop((left, top, left + crop_width, top + crop_height))


def preprocess(
    images: Picture | Sequence[Picture], model: ViT | Preprocessing
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Make a model's input from a picture, as timm's transform for evaluation does.

    Resize and crop (`resize_and_crop`), scale to [0, 1], subtract the mean, divide by the standard
    deviation.

    Parameters
    ----------
    images : picture or sequence of pictures
        Each a PIL.Image.Image, or a numpy.ndarray (height, width[, 3 or 4]) of uint8.
    model : ViT or Preprocessing
        The model to prepare for.

    Returns
    -------
    numpy.ndarray (batch, channels, height, width) of float32
        A batch of one for a single picture.
    """
    how = model if isinstance(model, Preprocessing) else model.preprocessing
    pictures = [images] if isinstance(images, Image.Image | np.ndarray) else list(images)
    channels = len(how.mean)
    batch = np.empty((len(pictures), channels, *how.image_size), dtype=np.float32)
    for pixels, picture in zip(batch, pictures, strict=True):
        seen = np.asarray(resize_and_crop(picture, how), dtype=np.float32)
        pixels[...] = seen.reshape(*how.image_size, channels).transpose(2, 0, 1)
    batch /= 255
    batch -= np.asarray(how.mean, dtype=np.float32)[:, None, None]
    batch /= np.asarray(how.std, dtype=np.float32)[:, None, None]
    return batch


def _pillow(image: Picture) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if not isinstance(image, np.ndarray):
        raise TypeError(f"a picture is a PIL image or a NumPy array, got {type(image).__name__}")
    if image.dtype != np.uint8:
        raise TypeError(f"a picture as an array must be uint8, got {image.dtype}")
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
        raise ValueError(
            "a picture as an array must be (height, width), (height, width, 3) or "
            f"(height, width, 4), got {image.shape}"
        )
    return Image.fromarray(np.ascontiguousarray(image))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would clip 16-bit greys at 255, which is white.
        grey = np.asarray(image).astype(np.uint32)
        image = Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"its pixels (Pillow's mode {image.mode}) have no range that means white")
    return image.convert("RGB")
