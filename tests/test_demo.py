"""The demo from end to end."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
from building import missing
from PIL import Image
from rich.console import Console

from workbench import compile as compiler
from workbench import demo


def test_the_demo_prints_its_tables_and_writes_the_map(tmp_path: Path) -> None:
    stream = io.StringIO()
    demo.run(Console(file=stream, width=100), tmp_path)
    out = stream.getvalue()
    assert "196 patches" in out
    for title in ("attention forward", "attention backward", "random weights"):
        assert title in out
    for backend in ("cpu", "reference"):
        rows = re.findall(rf"^(?:\S+ +)?{backend} +\d", out, flags=re.MULTILINE)
        assert len(rows) == 3, "forward, backward and the model"
    if compiler.gpu_missing() is not None and not any(map(missing, compiler.LANGUAGES)):
        for language in compiler.LANGUAGES:
            assert (
                len(re.findall(rf"^attention_flash_simt +{language} +\d", out, re.MULTILINE)) == 2
            )
    with Image.open(tmp_path / demo.FILE_NAME) as picture:
        pixels = np.asarray(picture)
    height, width, _ = pixels.shape
    assert width > 1.9 * height, "the picture and the map beside each other"
    left, right = pixels[:, : width // 2].astype(int), pixels[:, width // 2 :].astype(int)
    assert left.std() > 20
    assert right.std() > 20
