"""What a model takes of memory: bytes that a token reads, and planes that are in memory now."""

from __future__ import annotations

from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import torch

from otaro.file.fits import Fit
from otaro.file.header import BASE, shard_name
from otaro.runtime.modules import SefpEmbedding, SefpExperts
from otaro.runtime.precision import attachment
from otaro.sefp.precision import FINEST, Precision


def weight_bytes_per_token(model: Any, precision: Precision | Fit) -> int:
    """Bytes of the matrices that computing one token reads, packed or not: not those for looking up rows."""
    attached = attachment(model)
    schema, shares = attached.nested.schema, read_shares(model)
    packed = {module.packed.name: module.packed for module in attached.modules.values()}
    entries = {plane: schema.packed_entries(plane) for plane in range(BASE, FINEST + 1)}
    total = 0
    for name, share in shares.items():
        bits = (precision.precisions[name] if isinstance(precision, Fit) else precision).mantissa_bits
        # Scales as they lie in memory: a byte each.
        size = packed[name].scales.nbytes + sum(
            prod(entries[plane][name][1]) for plane in range(BASE, bits + 1)
        )
        total += int(size * share)
    text = _text_modules(model)
    plain: set[torch.Tensor] = {
        p
        for m in text
        for p in m.parameters(recurse=False)
        if p.dim() > 1 and not isinstance(m, torch.nn.Embedding)
    }
    return total + sum(matrix.nbytes for matrix in plain)


def read_shares(model: Any) -> dict[str, Fraction]:
    """The share of every packed tensor that computing one token reads: of embeddings a row: nothing."""
    shares, text = dict[str, Fraction](), _text_modules(model)
    for module in attachment(model).modules.values():
        share = Fraction(0 if isinstance(module, SefpEmbedding) or module not in text else 1)
        if isinstance(module, SefpExperts):
            share *= Fraction(model.config.num_experts_per_tok, module.packed.shape[0])
        name = module.packed.name
        shares[name] = max(share, shares.get(name, share))  # what is shared is read once
    return shares


def _text_modules(model: Any) -> set[Any]:
    """Those that read text, and no tower of another sense."""
    return {*model.get_decoder().modules(), model.get_output_embeddings()}


def resident_planes(model: Any) -> dict[int, int] | None:
    """Bytes of the base shard (3) and of each plane (4 to 8) that are in memory; None where the system does
    not tell.

    Shards are mapped: what was read of one is in memory until the system wants it back, or `trim` gives it
    back. The process's maps say how much that is, file by file (Linux). On a GPU it is what was copied there.
    """
    attached = attachment(model)
    weights = {module.packed for module in attached.modules.values()}
    found = dict.fromkeys(range(BASE, FINEST + 1), 0)
    if any(packed.base.device.type != "cpu" for packed in weights):
        for packed in weights:
            found[BASE] += packed.scales.nbytes + packed.base.nbytes
            for number, plane in enumerate(packed.planes_above(BASE), BASE + 1):
                found[number] += plane.nbytes
        return found
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        return None
    files = {str((attached.nested.path / shard_name(plane)).resolve()): plane for plane in found}
    mapped: int | None = None
    for line in maps.read_text().splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):  # the range of a mapping, its rights, offset, device, inode and file
            mapped = files.get(values[-1])
        elif name == "Rss:" and mapped is not None:
            found[mapped] += int(values[0]) << 10
    return found
