"""Checkpoints for MLX: integers times scales plus biases, and MLX itself where it is installed."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

import otaro
from otaro.errors import OtaroError
from otaro.export.grid import Grid
from otaro.export.mlx import Affine, integer_bits, is_exact
from otaro.export.run import export
from otaro.export.source import Piece
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT
from tests.export.conftest import every_code

needs_mlx = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None, reason="MLX is not installed (pip install 'mlx[cpu]' on Linux)"
)
BYTES = torch.arange(256, dtype=torch.uint8)


def dequantized(words, scales, biases, size, bits):
    """By MLX, in the type of scales and biases; as float32."""
    import mlx.core as mx
    import numpy as np

    kind = {torch.float16: mx.float16, torch.bfloat16: mx.bfloat16, torch.float32: mx.float32}[scales.dtype]
    with mx.stream(mx.cpu):
        scales, biases = (mx.array(part.float().numpy()).astype(kind) for part in (scales, biases))
        found = mx.dequantize(mx.array(words.numpy()), scales, biases, group_size=size, bits=bits)
        return torch.from_numpy(np.array(found.astype(mx.float32)))


CASES = [
    (3, "midpoint", 4, torch.bfloat16, -13),
    (3, "midpoint", 4, torch.float16, -12),
    (4, "midpoint", 5, torch.float16, -10),
    (5, "midpoint", 6, torch.float16, -9),
    (6, "midpoint", 8, torch.float16, -8),
    (7, "midpoint", 8, torch.float32, -13),
    (3, "truncate", 4, torch.bfloat16, -13),
    (6, "truncate", 8, torch.float16, -9),
    (7, "truncate", 8, torch.float32, -13),
]


@pytest.mark.parametrize("by", ["our arithmetic", pytest.param("mlx", marks=needs_mlx)])
@pytest.mark.parametrize(("bits", "reconstruction", "width", "dtype", "least_exponent"), CASES)
def test_every_code_at_every_scale_is_held_exactly(bits, reconstruction, width, dtype, least_exponent, by):
    """Float16 ends at steps of 2^-24: below `least_exponent` some units are not among its numbers. And twice
    the largest scale of all is too large for it."""
    grid = Grid(bits, reconstruction)
    assert integer_bits(grid) == width
    assert is_exact(grid, dtype, BYTES)
    for exponent in range(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT + 1):
        rows = every_code(bits, reconstruction, exponent)
        form, piece = Affine(width, 64, dtype, grid), Piece("x.weight", "x", tuple(rows.codes.shape))
        stored = form.encode(piece, rows)
        parts = (stored["x.weight"].view(torch.uint32), stored["x.scales"], stored["x.biases"])
        found = dequantized(*parts, 64, width) if by == "mlx" else form.decode(piece, stored).float()
        assert torch.equal(found, rows.values()) == (
            least_exponent <= exponent <= (6 if dtype == torch.float16 else 7)
        )


def test_what_16_bits_are_too_few_for():
    assert integer_bits(Grid(8, "midpoint")) is None
    assert not is_exact(Grid(4, "midpoint"), torch.bfloat16, BYTES)
    assert not is_exact(Grid(7, "midpoint"), torch.float16, BYTES)


@pytest.mark.parametrize("architecture", ["llama", "llama_tied", "qwen3", "mixtral", "gemma3"])
@pytest.mark.parametrize("precision", ["E5M3", "E5M4", "E5M7"])
def test_a_checkpoint_is_exact_and_says_so(architecture, precision, make_fitting, decoded, tmp_path):
    nested = make_fitting(architecture)
    report = export(nested, tmp_path / "out", precision=precision, to="mlx")
    assert report.exact, report
    written = load_file(tmp_path / "out" / "model.safetensors")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert stated == {"group_size": 32, "bits": {"E5M3": 4, "E5M4": 5, "E5M7": 8}[precision]}, "rows of 96"
    assert written["model.embed_tokens.weight"].dtype == torch.uint32
    assert written["model.embed_tokens.weight"].shape == (120, 96 * stated["bits"] // 32)
    if importlib.util.find_spec("mlx") is not None:
        parts = [written[f"model.embed_tokens.{part}"] for part in ("weight", "scales", "biases")]
        found = dequantized(*parts, stated["group_size"], stated["bits"])
        assert torch.equal(found, decoded(nested, precision)["model.embed_tokens.weight"])


def test_weights_that_are_too_large_for_float16_get_float32(random_model, tmp_path):
    model = random_model("llama", dtype="float32")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 32760
    model.save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    assert export(tmp_path / "nested", tmp_path / "out", precision="E5M4", to="mlx").exact
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.scales"].dtype == torch.float32
    )


def test_the_finest_precision_is_in_full(make_fitting, tmp_path):
    report = export(make_fitting("llama"), tmp_path / "out", precision="E5M8", to="mlx")
    assert report.exact
    assert report.notes == ["MLX has no integers that hold E5M8: weights are in full"]
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_other_layouts_are_refused(make_nested, tmp_path):
    with pytest.raises(OtaroError, match=r"gpt2 models cannot be written for MLX here; export --to hf"):
        export(make_nested("gpt2"), tmp_path / "out", precision="E5M3", to="mlx")
