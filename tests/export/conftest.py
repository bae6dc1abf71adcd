"""What the tests of exports share: the values that a nested model has, by the codec alone."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch

from otaro.file.header import BASE
from otaro.file.io import NestedDirectory
from otaro.file.planes import unpack_codes
from otaro.sefp.codec import SefpTensor


@pytest.fixture(scope="session")
def decoded() -> Callable[[Path, str], dict[str, torch.Tensor]]:
    """decoded(directory, "E5M4"): every tensor of a nested model, float32, by the names and shapes of the model class."""

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
