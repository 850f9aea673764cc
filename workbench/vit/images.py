"""From a picture file to the array that a vision transformer takes, step by step."""

from __future__ import annotations

import importlib.resources
import math
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        Height and width of the input, cut out of the middle of the resized picture.
    resize : (int, int), optional
        Height and width that the picture is resized to, no less than `image_size`, which is the
        default: nothing is cut off then but what the proportions ask for.
    fit : {"shorter", "cover", "exact"}
        How the picture's proportions are dealt with. ``"exact"`` gives them up. The other two keep
        them and cover `resize`; the longer side is rounded down, as torchvision does for a square,
        or to the nearest, as timm does for other than squares.
    centre : {"round", "floor"}
        How half a pixel is rounded where the middle is cut out: timm or Hugging Face.
    interpolation : str
        Pillow's filter: nearest, box, bilinear, hamming, bicubic or lanczos.
    rescale : float
        Factor of the pixels, which are from 0 to 255.
    mean, std : tuple of float
        A value a channel, for rescaled pixels. One channel means a grey picture.
    """

    image_size: tuple[int, int] = (224, 224)
    resize: tuple[int, int] | None = None
    fit: str = "shorter"
    centre: str = "round"
    interpolation: str = "bicubic"
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise ValueError(f"image_size must be positive, got {self.image_size}")
        if any(r < n for r, n in zip(self.resized, self.image_size, strict=True)):
            raise ValueError(
                f"resize must be no less than image_size, got {self.resize} and {self.image_size}"
            )
        for name, choices in (
            ("fit", ("shorter", "cover", "exact")),
            ("centre", ("round", "floor")),
            ("interpolation", tuple(RESAMPLING)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )
        if not self.mean or len(self.std) != len(self.mean):
            raise ValueError(
                f"mean and std must have one value a channel, got {self.mean} and {self.std}"
            )
        numbers = (*self.mean, *self.std, self.rescale)
        if not all(math.isfinite(value) for value in numbers) or min(*self.std, self.rescale) <= 0:
            raise ValueError(
                "mean must be finite, std and rescale finite and positive, got "
                f"{self.mean}, {self.std} and {self.rescale}"
            )

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width that the picture is resized to."""
        return self.resize or self.image_size

    def for_size(self, image_size: tuple[int, int]) -> Preprocessing:
        """The same view of a picture, in another size."""
        height, width = (
            max(new, round(resized * new / old))
            for new, resized, old in zip(image_size, self.resized, self.image_size, strict=True)
        )
        return replace(self, image_size=image_size, resize=(height, width))


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


def check_picture_path(path: Path) -> None:
    """Raise a ValueError if no picture can be written under this name."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    if path.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"{path} is not the name of a picture file")


def save_picture(image: Image.Image, path: Path) -> None:
    """Write a picture, whole or not at all."""
    # In the folder itself, so that it can be renamed; its suffix names the format.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".workbench-") as folder:
        written = Path(folder) / f"picture{path.suffix}"
        image.save(written)
        written.replace(path)


def portrait() -> Image.Image:
    """The photograph that the demo looks at: Grace Hopper, 448 x 448, public domain.

    Its origin is told in ``data/portrait.txt`` beside it.
    """
    file = importlib.resources.files("workbench.vit") / "data" / "portrait.jpg"
    with file.open("rb") as stream, Image.open(stream) as opened:
        return opened.convert("RGB")


def resize_and_crop(image: Picture, preprocessing: Preprocessing) -> Image.Image:
    """The part of a picture that a model sees, in the model's size.

    Parameters
    ----------
    image : PIL.Image.Image or numpy.ndarray (height, width[, 3 or 4]) of uint8
        The picture.
    preprocessing : Preprocessing
        Sizes, proportions and filter.

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
    # Pillow's filters widen when they shrink a picture, so this is antialiased.
    size = _size_to_resize(picture, preprocessing)
    picture = picture.resize(size, RESAMPLING[preprocessing.interpolation])
    crop_height, crop_width = preprocessing.image_size
    rounded = round if preprocessing.centre == "round" else math.floor
    left = rounded((size[0] - crop_width) / 2)
    top = rounded((size[1] - crop_height) / 2)
    return picture.crop((left, top, left + crop_width, top + crop_height))


def _size_to_resize(picture: Image.Image, preprocessing: Preprocessing) -> tuple[int, int]:
    """Width and height to resize a picture to."""
    height, width = preprocessing.resized
    if preprocessing.fit == "exact":
        return width, height
    down, across = picture.height / height, picture.width / width
    if preprocessing.fit == "cover":
        ratio = min(down, across)
        return round(picture.width / ratio), round(picture.height / ratio)
    if down < across:
        return height * picture.width // picture.height, height
    return width, width * picture.height // picture.width


def preprocess(
    images: Picture | Sequence[Picture],
    model: ViT | Preprocessing,
    *,
    image_size: tuple[int, int] | None = None,
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Make a model's input from a picture, as the library that the checkpoint is from does it.

    Resize and crop (`resize_and_crop`), rescale, subtract the mean, divide by the standard
    deviation.

    Parameters
    ----------
    images : picture or sequence of pictures
        Each a PIL.Image.Image, or a numpy.ndarray (height, width[, 3 or 4]) of uint8.
    model : ViT or Preprocessing
        The model to prepare for.
    image_size : (int, int), optional
        Height and width other than the model's own: the same view of the picture, finer or coarser.

    Returns
    -------
    numpy.ndarray (batch, channels, height, width) of float32
        A batch of one for a single picture.
    """
    how = model if isinstance(model, Preprocessing) else model.preprocessing
    if image_size is not None:
        how = how.for_size(image_size)
    pictures = [images] if isinstance(images, Image.Image | np.ndarray) else list(images)
    channels = len(how.mean)
    batch = np.empty((len(pictures), channels, *how.image_size), dtype=np.float32)
    for pixels, picture in zip(batch, pictures, strict=True):
        seen = np.asarray(resize_and_crop(picture, how), dtype=np.float32)
        pixels[...] = seen.reshape(*how.image_size, channels).transpose(2, 0, 1)
    batch *= np.float32(how.rescale)
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
