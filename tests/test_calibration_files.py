"""Static scales in files: by our own names and those of others, and what is wrong with them."""

import builtins
import json

import pytest
import torch
from test_calibration import DEVICE, DIM, HEADS, STATIC, numbers

from tkv.calibration import Calibrator, calibrate, load_scales, save_scales
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError


@pytest.fixture
def store(tmp_path):
    """Writes a file of tensors by the ends of their names, and gives its path."""
    torch_files = pytest.importorskip("safetensors.torch")

    def write(name="model.safetensors", prefix="model.layers.0.self_attn.", **tensors):
        path = tmp_path / name
        torch_files.save_file({prefix + key.replace("__", "."): value.clone() for key, value in tensors.items()}, path)
        return path

    return write


@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_scales_come_back_from_a_file_as_they_were(tmp_path, kind, heads):
    pytest.importorskip("safetensors")
    calibrator = Calibrator(11, kind)
    for layer in range(11):
        x = numbers(9, HEADS, DIM, seed=layer)[:, :heads]
        calibrator.update(layer, x, 2 * x)
    path = tmp_path / "kv_scales.safetensors"
    calibrator.save(path)
    for place in (path, str(path), tmp_path):
        scales = load_scales(place, kind, device=DEVICE)
        assert list(scales) == list(range(11))
        for layer, pair in scales.items():
            for got, expected in zip(pair, calibrator.scales(layer), strict=True):
                assert got.dtype == torch.float32 and got.device == DEVICE and torch.equal(got, expected)


def test_files_have_the_names_of_vllm(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    x = numbers(9, HEADS, DIM)
    scales = calibrate([[(x, x), (x, 2 * x)]], ("fp8_e4m3/tensor", "fp8_e4m3/head"))
    save_scales(tmp_path / "a.safetensors", scales, ("fp8_e4m3/tensor", "fp8_e4m3/head"))
    stored = torch_files.load_file(tmp_path / "a.safetensors")
    assert sorted(stored) == [f"model.layers.{layer}.self_attn.{x}_scale" for layer in (0, 1) for x in "kv"]
    assert stored["model.layers.1.self_attn.k_scale"].shape == () and stored["model.layers.1.self_attn.v_scale"].shape == (HEADS,)


def test_other_prefixes_and_chosen_layers_are_saved_and_loaded(tmp_path):
    pytest.importorskip("safetensors")
    x = numbers(9, HEADS, DIM)
    calibrator = Calibrator(4, ("int8/channel", "bf16"))
    for layer in (1, 3):
        calibrator.update(layer, x * (layer + 1), None)
    path, prefix = tmp_path / "a.safetensors", "language_model.h.{layer}.attn"
    with pytest.raises(RangeError, match="no tokens of layer 0"):
        calibrator.save(path, prefix)
    assert not path.exists()
    calibrator.save(path, prefix, layers=calibrator.layers)
    scales = load_scales(path, ("int8/channel", "bf16"), prefix)
    assert list(scales) == [1, 3]
    assert torch.equal(scales[3][0], calibrator.scales(3)[0].cpu()) and scales[3][1] is None
    with pytest.raises(UnsupportedError, match=r"names are like language_model\.h\.1\.attn\.k_scale, which needs another prefix="):
        load_scales(path, ("int8/channel", "bf16"))
    with pytest.raises(RangeError, match="prefix: expected a text with"):
        load_scales(path, "int8/channel", prefix="model")


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("k_scale", "v_scale"),
        ("attn__k_scale", "attn__v_scale"),
        ("k_proj__k_scale", "v_proj__v_scale"),
        ("qkv_proj__k_scale", "qkv_proj__v_scale"),
        ("k_proj__output_scale", "v_proj__output_scale"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_of_other_libraries_are_read(store, k_name, v_name, dtype):
    others = {"q_scale": torch.tensor(9.0), "q_proj__output_scale": torch.tensor(9.0), "k_proj__weight": torch.ones(2, 2)}
    path = store(**{k_name: torch.tensor([0.5], dtype=dtype), v_name: torch.tensor(0.25, dtype=dtype)}, **others)
    (k_scale, v_scale) = load_scales(path, "fp8_e4m3/tensor")[0]
    assert (k_scale.item(), v_scale.item()) == (0.5, 0.25) and k_scale.shape == v_scale.shape == () and v_scale.dtype == torch.float32


def test_one_old_scale_is_for_k_and_v_where_newer_ones_are_not(store):
    path = store(kv_scale=torch.tensor(0.5), v_scale=torch.tensor(0.25))
    assert [scale.item() for scale in load_scales(path, "fp8_e5m2/tensor")[0]] == [0.5, 0.25]


def test_scales_of_heads_are_read_in_both_shapes(store):
    heads = torch.arange(1.0, 5.0)
    path = store(k_scale=heads, v_scale=heads.reshape(-1, 1, 1))
    assert all(torch.equal(scale, heads) for scale in load_scales(path, "fp8_e4m3/head")[0])


@pytest.mark.parametrize(
    ("scale", "kind", "found"),
    [
        (torch.ones(4), "fp8_e4m3/tensor", "head"),
        (torch.ones(4, 1, 1), "fp8_e4m3/tensor", "head"),
        (torch.ones(()), "fp8_e4m3/head", "tensor"),
        (torch.ones(1), "fp8_e4m3/head", "tensor"),
        (torch.ones(4, 16), "int8/head", "channel"),
        (torch.ones(4), "int8/channel", "head"),
    ],
)
def test_scales_of_another_kind_are_refused_by_both_names(store, scale, kind, found):
    message = rf"k_scale of shape .* is a scale of kind '{found}', and {kind} asks for kind '{kind.partition('/')[2]}'"
    with pytest.raises(UnsupportedError, match=message):
        load_scales(store(k_scale=scale, v_scale=scale), kind)


def test_scales_of_another_dtype_are_refused_where_the_file_tells_it(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    save_scales(path, {0: (torch.tensor(0.5), torch.tensor(0.5))}, "int8/tensor")
    with pytest.raises(UnsupportedError, match="k_scale is a scale of int8/tensor, asked for fp8_e4m3/tensor"):
        load_scales(path, "fp8_e4m3/tensor")


def test_a_folder_of_shards_is_read_as_its_index_says(tmp_path, store):
    half, old = torch.tensor(0.5), torch.tensor(7.0)
    store("model-00001-of-00002.safetensors", k_scale=half, k_proj__weight=torch.ones(2))
    store("model-00002-of-00002.safetensors", v_scale=2 * half)
    store("model-00002-of-00003.safetensors", prefix="model.layers.1.self_attn.", k_scale=half, v_scale=half)
    assert list(load_scales(tmp_path, "fp8_e4m3/tensor")) == [0, 1]
    store("consolidated.safetensors", k_scale=old, v_scale=old)
    names = {"k_scale": 1, "k_proj.weight": 1, "v_scale": 2}
    weight_map = {f"model.layers.0.self_attn.{name}": f"model-0000{part}-of-00002.safetensors" for name, part in names.items()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    scales = load_scales(tmp_path, "fp8_e4m3/tensor")
    assert list(scales) == [0] and [scale.item() for scale in scales[0]] == [0.5, 1.0]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model-00002-of-00002\.safetensors"):
        load_scales(tmp_path, "fp8_e4m3/tensor")


def test_files_without_what_is_needed_say_so(tmp_path, store):
    one = torch.tensor(1.0)
    with pytest.raises(FileNotFoundError, match="there is no"):
        load_scales(tmp_path / "nowhere", "int8/tensor")
    with pytest.raises(FileNotFoundError, match=r"has no \*\.safetensors"):
        load_scales(tmp_path, "int8/tensor")
    with pytest.raises(UnsupportedError, match=r"has no scales named model\.layers\.\{layer\}\.self_attn\.k_scale or the like$"):
        load_scales(store(k_proj__weight=torch.ones(2)), "int8/tensor")
    with pytest.raises(RangeError, match=r"has no model\.layers\.0\.self_attn\.v_scale, which int8/tensor needs"):
        load_scales(store(k_scale=one), "int8/tensor")
    assert load_scales(store(k_scale=one), ("int8/tensor", "bf16"))[0][1] is None
    for bad in (0.0, -1.0, torch.nan, torch.inf):
        with pytest.raises(RangeError, match=r"k_scale is not positive and finite"):
            load_scales(store(k_scale=torch.tensor(bad), v_scale=one), "int8/tensor")
    with pytest.raises(UnsupportedError, match="v_scale comes with a zero point"):
        load_scales(store(k_scale=one, v_scale=one, v_zero_point=torch.tensor([3], dtype=torch.int8)), "int8/tensor")
    load_scales(store(k_scale=one, v_scale=one, v_zero_point=torch.tensor([0], dtype=torch.int8)), "int8/tensor")
    with pytest.raises(DTypeError, match=r"k_scale is torch\.int32"):
        load_scales(store(k_scale=one.int(), v_scale=one), "int8/tensor")


@pytest.mark.parametrize(
    ("error", "pair"),
    [
        (ShapeError, (torch.ones(3), torch.ones(()))),
        (ShapeError, (None, torch.ones(()))),
        (DTypeError, (1.0, torch.ones(()))),
        (DTypeError, (torch.ones((), dtype=torch.float64), torch.ones(()))),
    ],
)
def test_wrong_scales_are_not_saved(tmp_path, error, pair):
    with pytest.raises(error, match=r"model\.layers\.5\.self_attn\.k_scale"):
        save_scales(tmp_path / "a.safetensors", {5: pair}, "int8/tensor")
    assert not (tmp_path / "a.safetensors").exists()


def test_without_safetensors_files_say_what_to_install_and_calibration_works(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    scales = calibrate([(torch.ones(2, 1, 16), torch.ones(2, 1, 16))], "int8/tensor")
    for use in (lambda: save_scales(tmp_path / "a", scales, "int8/tensor"), lambda: load_scales(tmp_path, "int8/tensor")):
        with pytest.raises(ImportError, match=r"pip install 'tkv\[calibrate\]'"):
            use()
