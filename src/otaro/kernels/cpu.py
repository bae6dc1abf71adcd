"""The C++ extension `_cpu` behind the functions of `reference`: same names, same arguments, same bits.

Tensors cross as numpy views; nothing is copied. The extension has threads of its own, as many as torch uses.
"""

from __future__ import annotations

from shutil import which
from typing import Any

import torch

from otaro.errors import pip_install
from otaro.kernels.packed import Packed

try:
    from otaro.kernels import _cpu as _cpu  # built from csrc/; _cpu.pyi says what is in it
except ImportError as error:
    _cpu = None  # type: ignore[assignment]
    _COMPILER = next(filter(None, map(which, ("c++", "g++", "clang++"))), None)
    MISSING = f"the C++ extension is not there ({error}); " + (
        f"install otaro again with `{pip_install('--verbose')}` to see why it was not built"
        if _COMPILER
        else "building it needs a C++ compiler, and none of c++, g++, clang++ is on this machine: install "
        "one, then otaro again"
    )
else:
    MISSING = ""

_TILE = 1 << 19  # weights that are decoded before they are multiplied: small enough for the cache


def available() -> list[str]:
    """The instruction sets that this CPU can run, the best first."""
    return [] if _cpu is None else list(_cpu.available())


def best() -> str:
    """The best of them."""
    return available()[0]


def choose(instructions: str) -> None:
    """Compute with these instructions from now on, on as many threads as torch uses."""
    if _cpu.chosen() != instructions:
        _cpu.choose(instructions)
    _cpu.set_threads(torch.get_num_threads())


def quantize(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.quantize`."""
    units = -(-x.shape[1] // _cpu.unit_size(group_size))
    codes, scales = torch.empty(x.shape, dtype=torch.int16), torch.empty(len(x), units)
    _cpu.quantize(_aligned(x.float()), group_size, codes.numpy(), scales.numpy())
    return codes, scales


def linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """As `reference.linear`."""
    out = torch.empty(len(x), len(packed.base))
    _cpu.linear(_aligned(x.float()), *_views(packed), out.numpy())
    return out


def decode(packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `reference.decode`."""
    values = torch.empty(len(packed.base), packed.length)
    _cpu.decode(*_views(packed), None, values.numpy())
    return values.to(dtype)


def embedding(ids: torch.Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As `reference.embedding`."""
    values = torch.empty(len(ids), packed.length)
    _cpu.decode(*_views(packed), _aligned(ids), values.numpy())
    return values.to(dtype)


def matmul(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `reference.matmul`, a tile of rows at a time: decoded into the cache, multiplied, overwritten."""
    count, rows = len(packed.base), max(1, _TILE // packed.length)
    tile = torch.empty(min(rows, count), packed.length)
    out = torch.empty(count, len(x), dtype=x.dtype)
    tokens, bias = x.T, bias if bias is None else bias.detach()
    for start in range(0, count, rows):
        some = slice(start, start + rows)
        values = tile[: min(rows, count - start)]
        _cpu.decode(*_views(packed.rows(some)), None, values.numpy())
        if bias is None:
            torch.mm(values.to(x.dtype), tokens, out=out[some])
        else:
            torch.addmm(bias[some, None], values.to(x.dtype), tokens, out=out[some])
    return out.T.contiguous()


def release_pages(mapped: torch.Tensor) -> None:
    """Hand the memory of an unchanged tensor that is mapped from a file back to the operating system."""
    _cpu.release_pages(mapped.numpy())


def _aligned(tensor: torch.Tensor) -> Any:
    """The numpy view of a tensor, or of a copy where its numbers do not lie at multiples of their size."""
    return (tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor).numpy()


def _views(packed: Packed) -> tuple[Any, Any, list[Any], int, int, bool, int]:
    planes = [plane.numpy() for plane in packed.planes]
    return packed.base.numpy(), packed.scales.numpy(), planes, *packed[3:]
