"""What the tests of exports share: the values that a nested model has, by the codec alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch

import otaro
from otaro.export.grid import Grid
from otaro.export.source import Rows
from otaro.file.header import BASE
from otaro.file.io import NestedDirectory
from otaro.file.planes import unpack_codes
from otaro.sefp.codec import SefpTensor, scale_values


@pytest.fixture(scope="session")
def decoded() -> Callable[[Path, str], dict[str, torch.Tensor]]:
    """decoded(directory, "E5M4"): a nested model's tensors, float32, with names and shapes of its class."""

    def decode(directory: Path, precision: str) -> dict[str, torch.Tensor]:
        nested = NestedDirectory(directory)
        bits, schema = int(precision[-1]), nested.schema
        found = {name: nested.base.tensor(name).float() for name in nested.unpacked}
        for name, shape in schema.packed.items():
            planes = [nested.plane(plane).tensor(name) for plane in range(BASE + 1, 9)]
            codes = unpack_codes(nested.base.tensor(name), planes, shape[-1])
            scales, exponent = nested.scale_bytes(name), schema.scale_exponents[name]
            tensor = SefpTensor(scales, exponent, codes, schema.group_size, schema.reconstruction)
            values = tensor.decode(f"E5M{bits}")
            assert values.numel() == prod(shape)
            found[name] = values.T if ".c_" in name else values  # GPT-2's convolutions
        return found

    return decode


# What llama.cpp builds in is not to be had otherwise in its files: the models of tests/conftest.py, made to
# agree with it.
FITTING = {
    "llama": {},
    "llama_tied": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "smollm3": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "granite": {},
    "gemma2": {"query_pre_attn_scalar": 28},
    "gemma3": {"query_pre_attn_scalar": 20},
}


@pytest.fixture(scope="session")
def make_fitting(random_model, tmp_path_factory) -> Callable[..., Path]:
    """make_fitting("gemma2") is a nested model that every target can hold, shared by all tests: read only."""

    @cache
    def make(architecture: str, reconstruction: str = "midpoint") -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        random_model(architecture, **FITTING[architecture]).save_pretrained(folder / "checkpoint")
        otaro.pack(folder / "checkpoint", folder / "nested", reconstruction=reconstruction)
        return folder / "nested"

    return make


def every_code(bits: int, reconstruction: str, exponent: int) -> Rows:
    """A row for each scale byte, with all codes in it."""
    codes = torch.arange(-(1 << bits), 1 << bits, dtype=torch.int16)
    codes = codes.repeat(-(-64 // len(codes))).expand(256, -1)
    scales = scale_values(torch.arange(256, dtype=torch.uint8), exponent).view(-1, 1)
    return Rows(codes, scales.expand(-1, codes.shape[-1] // 64), Grid(bits, reconstruction), 64)
