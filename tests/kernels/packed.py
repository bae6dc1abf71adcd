"""Packed weights at random, and the backends to multiply them with.

Base and planes are random bytes, so every code occurs, encodable or not, and the weights that fill up the
last block of a row are garbage, as a file may have them.
"""

from __future__ import annotations

import platform

import pytest
import torch

from otaro.file.planes import BASE_BYTES, PLANE_BYTES, blocks
from otaro.kernels import cpu, ops, packed, reference
from otaro.sefp.precision import COARSEST, PRECISIONS

INSTRUCTIONS = (
    ("portable", "neon", "dotprod", "i8mm")
    if platform.machine() in ("aarch64", "arm64")
    else ("portable", "avx2", "avxvnni", "avx512")
)
GRIDS = [(p.mantissa_bits, r) for p in PRECISIONS for r in (False, True)]
"""Mantissa bits and whether negative weights are cut toward zero: all twelve that there are."""


class Packed(packed.Packed):
    """A packed weight that can be seen at other precisions too."""

    def at(self, bits: int, truncate: bool) -> Packed:
        """The same bytes at a lower precision, or with another meaning."""
        return self._replace(planes=self.planes[: bits - COARSEST], truncate=truncate)


def make_packed(
    rows: int,
    length: int,
    group_size: int,
    bits: int = 8,
    truncate: bool = False,
    seed: int = 0,
    spread: int = 8,
    scale_exponent: int = -3,
) -> Packed:
    """Random bytes. Scales are any bytes, or with less `spread` those between 2^-spread and 2^(spread + 1),
    signs at random.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_bytes(columns: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)

    groups = -(-length // group_size)
    least, most = max(0, (7 - spread) << 3), min(128, (8 + spread) << 3)
    scales = torch.randint(least, most, (rows, groups), generator=generator, dtype=torch.uint8)
    scales |= torch.randint(0, 2, scales.shape, generator=generator, dtype=torch.uint8) << 7
    planes = [random_bytes(PLANE_BYTES * blocks(length)) for _ in range(bits - COARSEST)]
    return Packed(
        random_bytes(BASE_BYTES * blocks(length)),
        scales,
        planes,
        length,
        group_size,
        truncate,
        scale_exponent,
    )


def make_activations(tokens: int, length: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose size changes from one stretch of 32 to the next, with zeros, a power of two and a stretch
    of zeros.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    powers = torch.randint(-20, 20, (tokens, -(-length // 32)), generator=generator).repeat_interleave(32, 1)[
        :, :length
    ]
    x = torch.randn(tokens, length, generator=generator) * 2.0**powers
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    x[:, length // 2 : length // 2 + 1] = 1.0
    x[:, 128:192] = 0
    return x


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal in type, shape and every bit. NaN counts as equal to NaN: its sign and payload are no result."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if not got.is_floating_point():
        return torch.equal(got, expected)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return bool(
        (
            (got.contiguous().view(words) == expected.contiguous().view(words))
            | (got.isnan() & expected.isnan())
        ).all()
    )


def rounding_of_products(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """How far a library's products [tokens, rows] may be from exact ones: sums in any order, in the type of
    x.

    Within n epsilon of the sum of magnitudes, if nothing overflows on the way. Which of these results it is
    depends on the CPU, on addresses and on the number of threads.
    """
    limits = torch.finfo(x.dtype)
    sizes = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        sizes = sizes + bias.double().abs()
    return (x.shape[1] + 4) * (limits.eps * sizes + limits.smallest_normal)


def same_products(
    got: torch.Tensor,
    expected: torch.Tensor,
    x: torch.Tensor,
    weight: packed.Packed,
    bias: torch.Tensor | None = None,
) -> bool:
    """Equal in every bit for few tokens, as is promised; for many, each as exact as a library's."""
    if len(x) <= ops.FEW_TOKENS:
        return same_bits(got, expected)
    bound = 2 * rounding_of_products(x, reference.decode(weight), bias)
    return got.dtype == expected.dtype and bool(((got.double() - expected.double()).abs() <= bound).all())


def cannot_run(instructions: str) -> str:
    """Why this machine cannot compute with these instructions, or nothing."""
    if cpu.MISSING:
        return cpu.MISSING
    return (
        ""
        if instructions in cpu.available()
        else f"this CPU has no {instructions}: it can run {', '.join(cpu.available())}"
    )


def skip_unless_runnable(instructions: str) -> None:
    if reason := cannot_run(instructions):
        pytest.skip(reason)


def backends(with_reference: bool = True) -> list[str]:
    return [*(["reference"] if with_reference else []), *(f"cpu:{name}" for name in INSTRUCTIONS)]


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this backend serve, or skip the test and say why it cannot."""
    if backend != "reference":
        skip_unless_runnable(backend.removeprefix("cpu:"))
    monkeypatch.setenv(ops.OVERRIDE, backend)
    assert ops.backend()[0] == backend


def reference_linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    return reference.linear(x, weight)
