"""Packed planes to values, in plain torch.

The value of a stored u = code + 2^m is (u - 2^m) * step(m) with the reconstruction's correction (`sefp.codec`). Rows are
decoded a few thousand at a time, so that the intermediate words stay in the cache and only the result touches memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from otaro.file.planes import unpack_codes
from otaro.sefp.codec import Reconstruction, decode_codes
from otaro.sefp.precision import COARSEST

_CHUNK = 1 << 18  # weights


def decode(
    base: torch.Tensor,
    exponents: torch.Tensor,
    planes: Sequence[torch.Tensor],
    *,
    length: int,
    group_size: int,
    reconstruction: Reconstruction,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values [rows, length] of packed rows: base [rows, 16 n], exponents [rows, groups], planes [rows, 4 n] each.

    The precision is the one that base and planes make up: no plane gives E5M3, five give E5M8.
    """
    values = torch.empty(len(base), length, dtype=dtype, device=base.device)
    # Only a CPU has a cache to fit into; elsewhere each chunk would cost launches.
    size = max(1, _CHUNK // length) if base.device.type == "cpu" else max(len(base), 1)
    for start in range(0, len(base), size):
        some = slice(start, start + size)
        codes = unpack_codes(base[some], [plane[some] for plane in planes], length)
        decode_codes(codes, exponents[some], COARSEST + len(planes), group_size, reconstruction, out=values[some])
    return values
