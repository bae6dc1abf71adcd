"""What a model takes of memory: bytes that a token reads, and planes that are in memory now."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from otaro.file.header import BASE, shard_name
from otaro.runtime.modules import SefpEmbedding, SefpExperts
from otaro.runtime.precision import attachment
from otaro.sefp.precision import FINEST, Precision


def weight_bytes_per_token(model: Any, precision: Precision) -> int:
    """Bytes of the matrices that computing one token reads, packed or not: not those that rows are looked up in."""
    attached = attachment(model)
    schema = attached.nested.schema
    entries = [schema.packed_entries(plane) for plane in range(BASE, precision.mantissa_bits + 1)]
    sizes: dict[str, int] = {}
    text = {*model.get_decoder().modules(), model.get_output_embeddings()}  # and no tower of another sense
    for module in attached.modules.values():
        name = module.packed.name
        if isinstance(module, SefpEmbedding) or module not in text:
            continue  # reads a row, or nothing
        # Scales as they lie in memory: a byte each.
        size = module.packed.scales.nbytes + sum(prod(plane[name][1]) for plane in entries)
        if isinstance(module, SefpExperts):
            size = size * model.config.num_experts_per_tok // module.packed.shape[0]
        sizes[name] = size  # by name: what is shared is read once
    plain: set[torch.Tensor] = {
        p for m in text for p in m.parameters(recurse=False) if p.dim() > 1 and not isinstance(m, torch.nn.Embedding)
    }
    return sum(sizes.values()) + sum(matrix.nbytes for matrix in plain)


def resident_planes(model: Any) -> dict[int, int] | None:
    """Bytes of the base shard (3) and of each plane (4 to 8) that are in memory; None where the system does not tell.

    Shards are mapped: what was read of one is in memory until the system wants it back, or `trim` gives it back. The
    process's maps say how much that is, file by file (Linux). On a GPU it is what was copied there.
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
